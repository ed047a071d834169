"""Sharding on top of the backend: FSDP, DTensor, functional collectives, pipelines, checkpoints.

Results are compared with gloo or with a single process; of pycollect only the backend name is used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OLD_TORCH, OURS, RankContext
from sites import slow_on_processes
from torch import Tensor, nn

STEPS = 3
WORLD = 3
pytestmark = [slow_on_processes, pytest.mark.filterwarnings("ignore")]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 10, generator=generator), torch.randn(6, 4, generator=generator)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 4)
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, me: RankContext) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, me.rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(me: RankContext) -> tuple[list[float], list[Tensor]]:
    """Train on the batches of all ranks in one process; return this rank's losses and the final
    parameters."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [loss_of(model, rank, step) for rank in range(me.world)]
        (sum(each) / me.world).backward()
        optimizer.step()
        losses.append(each[me.rank].item())
    return losses, [p.detach() for p in model.parameters()]


def close(ours: list, wanted: list) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-5)


# --- FSDP -----------------------------------------------------------------------------------------


def fsdp1(me: RankContext) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    losses, parameters = train_alone(me)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = FSDP(
            net(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        close(train(model, me), losses)
        with FSDP.summon_full_params(model):
            close([p.detach().clone() for p in model.parameters()], parameters)
        model.clip_grad_norm_(1.0)


def fsdp2(me: RankContext) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (me.world,))
    losses, parameters = train_alone(me)
    for reshard in (True, False):
        model = net()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        close(train(model, me), losses)
        close([p.full_tensor().detach() for p in model.parameters()], parameters)
    half = net()
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.testing.assert_close(train(half, me), losses, rtol=0.1, atol=0.1)


def even_net() -> nn.Sequential:
    """A network whose layers can be divided between two ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))


def sharded_in_two_dimensions(me: RankContext) -> None:
    """FSDP2 over pairs of ranks, of which each pair divides the layers of its model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model, wanted = even_net(), even_net()
    plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh["model"], plan)
    fully_shard(model, mesh=mesh["data"])
    mine = mesh["data"].get_local_rank()
    for trained, ranks in ((model, [mine]), (wanted, [0, 1])):
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.05, foreach=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            (sum(loss_of(trained, rank, step) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
    close(
        [p.full_tensor().detach() for p in model.parameters()],
        [p.detach() for p in wanted.parameters()],
    )


# --- DTensor and functional collectives -----------------------------------------------------------


def dtensor(me: RankContext) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (me.world,))
    assert dist.get_backend(mesh.get_group()) == BACKEND
    whole = torch.arange(35.0).view(7, 5)
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            placed = distribute_tensor(whole, mesh, [first]).redistribute(mesh, [second])
            assert torch.equal(placed.full_tensor(), whole), (first, second)
    parts = DTensor.from_local(whole * me.rank, mesh, [Partial()])
    for target in (Replicate(), Shard(0), Shard(1)):
        wanted = whole * sum(range(me.world))
        assert torch.equal(parts.redistribute(mesh, [target]).full_tensor(), wanted)
    a, b = torch.randn(8, 6), torch.randn(6, 9)
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    same = [torch.zeros(8, 9) for _ in range(me.world)]
    dist.all_gather(same, product.full_tensor())
    assert all(torch.equal(s, same[0]) for s in same)


def functional(me: RankContext) -> None:
    from torch.distributed import _functional_collectives as f

    group = list(range(me.world))
    x = torch.arange(6.0) + me.rank
    everybody = [torch.arange(6.0) + r for r in range(me.world)]
    close([f.all_reduce(x, "sum", group)], [sum(everybody)])
    close([f.all_gather_tensor(x, 0, group)], [torch.cat(everybody)])
    close(
        [f.reduce_scatter_tensor(x, "avg", 0, group)],
        [list((sum(everybody) / me.world).chunk(me.world))[me.rank]],
    )
    close(
        [f.all_to_all_single(x, None, None, group)],
        [torch.cat([e.chunk(me.world)[me.rank] for e in everybody])],
    )
    close([f.broadcast(x, 1, group)], [everybody[1]])
    both = f.all_reduce_coalesced([x, 2 * x], "max", group)
    close(list(both), [everybody[-1], 2 * everybody[-1]])
    gathered = f.all_gather_into_tensor_coalesced([x, x[:2]], group)
    close(list(gathered), [torch.cat(everybody), torch.cat([e[:2] for e in everybody])])
    assert torch.equal(x, everybody[me.rank])

    if not OURS:  # gloo lacks the dtype
        return

    def moved(scales: Tensor) -> Tensor:
        y = f.broadcast(f.all_gather_tensor(scales, 0, group), 1, group)
        return f.all_to_all_single(y, None, None, group)

    torch._dynamo.reset()
    mine = x.byte().view(torch.float8_e8m0fnu)
    for call in (moved, torch.compile(moved, fullgraph=True, backend="aot_eager")):
        got = call(mine)
        assert got.dtype == mine.dtype
        close([got.view(torch.uint8)], [everybody[me.rank].byte().repeat(me.world)])


def compiled(me: RankContext) -> None:
    from torch.distributed import _functional_collectives as f

    group = list(range(me.world))

    def layer(x: Tensor) -> Tensor:
        y = f.all_reduce(x * 2, "sum", group)
        z = f.all_gather_tensor(y + 1, 0, group)
        return f.reduce_scatter_tensor(z * z, "sum", 0, group).sin()

    def old(x: Tensor) -> Tensor:
        y = x * 3
        dist.all_reduce(y)
        return y + 1

    x = torch.arange(6000.0) / 6000 + me.rank
    for function, compiler in ((layer, "inductor"), (layer, "aot_eager"), (old, "aot_eager")):
        got = torch.compile(function, fullgraph=True, backend=compiler)(x.clone())
        close([got], [function(x.clone())])


# --- pipelines and checkpoints --------------------------------------------------------------------


def pipeline(me: RankContext) -> None:
    """A layer per rank, four microbatches, two schedules: loss and gradients as in one process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(me.world)]
    x, y = torch.randn(8, 10), torch.randn(8, 10)
    whole = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
    whole.backward()
    wanted = [p.grad.clone() for p in layers[me.rank].parameters()]
    for kind in (ScheduleGPipe, Schedule1F1B):
        layers[me.rank].zero_grad()
        stage = PipelineStage(layers[me.rank], me.rank, me.world, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        if me.rank == 0:
            schedule.step(x)
        elif me.rank == me.world - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        close([p.grad for p in layers[me.rank].parameters()], wanted)
        if losses:
            close([torch.stack(losses).mean()], [whole.detach()])


def checkpoint(me: RankContext) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (me.world,))
    folder = f"{me.folder}/checkpoint"
    models = []
    for seed in (0, 1):
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += seed
        models.append(fully_shard(model, mesh=mesh))
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    loss_of(models[0], me.rank, 0).backward()
    optimizers[0].step()
    model_state, optimizer_state = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    model_state, optimizer_state = get_state_dict(models[1], optimizers[1])
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        models[1],
        optimizers[1],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    dist.barrier()


def checkpoint_in_background(me: RankContext) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model, folder = fully_shard(net()), f"{me.folder}/in_background"
    state = {"model": model.state_dict()}
    dcp.async_save(state, checkpoint_id=folder).result()
    for p in model.parameters():
        p.to_local().detach().zero_()
    dcp.load(state, checkpoint_id=folder)
    for p, wanted in zip(model.parameters(), net().parameters(), strict=True):
        assert torch.equal(p.full_tensor(), wanted)
    dist.barrier()


JOBS: tuple[Callable[[RankContext], None], ...]
JOBS = (fsdp1, fsdp2, dtensor, functional, pipeline, checkpoint)


@pytest.mark.skipif(OLD_TORCH, reason="FSDP2 of this torch mixes dtypes")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_sharded(pools, job):
    pools(WORLD).run(job, seconds=60)


@pytest.mark.slow
def test_compiled(pools):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++")
    pools(WORLD).run(compiled, seconds=60)


@pytest.mark.slow  # as long as it hangs
def test_checkpoint_in_background(pools):
    pools(WORLD).run(checkpoint_in_background, seconds=60)


def test_sharded_in_two_dimensions(pools):
    pools(4).run(sharded_in_two_dimensions, seconds=60)
