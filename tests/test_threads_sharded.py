"""Sharding and other calls of torch.distributed on ranks as threads, as in one process."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it, for some seconds
import torch.distributed as dist
from dist_rank import RankContext
from reference import assert_same
from test_dist_sharded import STEPS, batch, close, loss_of, net
from thread_jobs import WORLD, launch, launch_twice, parameters_of
from thread_programs import PARALLEL
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

# --- sharded: two launches give the same bits -----------------------------------------------------


def even_net() -> nn.Sequential:
    """Return a network whose layers can be divided between two ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))


def train_even(model: nn.Module, batches: range) -> None:
    """Train on the mean loss of several batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, n, step) for n in batches) / len(batches)).backward()
        optimizer.step()


def test_fsdp2_and_tensor_parallel_on_a_mesh_of_two_dimensions(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel as tp

    def job(me: RankContext) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model = even_net()
        plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
        tp.parallelize_module(model, mesh["model"], plan)
        fully_shard(model, mesh=mesh["data"])
        mine = mesh["data"].get_local_rank()
        train_even(model, range(mine, mine + 1))
        return [p.full_tensor().detach() for p in model.parameters()]

    wanted = even_net()
    train_even(wanted, range(2))
    for rank in launch_twice(job, 4, tmp_path):
        close(rank, parameters_of(wanted))


@PARALLEL
@pytest.mark.parametrize("world", [2, 4])
def test_loss_of_logits_that_are_divided_by_classes(tmp_path, world, parallel):
    """Ranks left the context of another one, or met its handlers, or failed to leave it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    x, target = torch.randn(6, 10), torch.arange(6) % 8
    classifier = nn.Linear(10, 8)  # made once, as ranks that run at once share a random state

    def job(me: RankContext) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (me.world,))
        colwise = tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        model = tp.parallelize_module(copy.deepcopy(classifier), mesh, colwise)
        found = []
        for _ in range(STEPS):
            model.zero_grad()
            with tp.loss_parallel():
                dist.barrier()
                loss = nn.functional.cross_entropy(model(x), target)
                loss.backward()
            found += [loss.full_tensor().detach()]
            found += [p.grad.full_tensor() for p in model.parameters()]
        return found

    loss = nn.functional.cross_entropy(classifier(x), target)
    grads = torch.autograd.grad(loss, list(classifier.parameters()))
    for rank in launch(job, world, tmp_path, parallel=parallel):
        close(rank, [loss.detach(), *grads] * STEPS)


def test_activation_checkpointing_with_fsdp2(tmp_path):
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    def job(me: RankContext) -> list[Tensor]:
        model = net()
        fully_shard(model)
        x, y = batch(me.rank, 0)
        out = checkpoint(lambda x: model(nn.functional.dropout(x, 0.0)), x, use_reentrant=False)
        nn.functional.mse_loss(out, y).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    model = net()
    (sum(loss_of(model, r, 0) for r in range(WORLD)) / WORLD).backward()
    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, [p.grad for p in model.parameters()])


@pytest.mark.slow  # as long as it hangs
def test_a_checkpoint_saved_in_the_background(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    def job(me: RankContext) -> list[Tensor]:
        model = net()
        fully_shard(model)
        state = {"model": model.state_dict()}
        dcp.async_save(state, checkpoint_id=f"{me.folder}/checkpoint").result()
        for p in model.parameters():
            p.to_local().detach().zero_()
        dcp.load(state, checkpoint_id=f"{me.folder}/checkpoint")
        return [p.full_tensor().detach() for p in model.parameters()]

    for rank in launch_twice(job, WORLD, tmp_path):
        assert_same(rank, parameters_of(net()))


# --- other calls ----------------------------------------------------------------------------------


def test_differentiable_collectives_first_imported_by_a_rank(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.nn.functional", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed.nn", raising=False)

    def job(me: RankContext) -> list[Tensor]:
        import torch.distributed.nn.functional as differentiable

        x = torch.full((2,), me.rank + 1.0, requires_grad=True)
        (differentiable.all_reduce(x) * (me.rank + 1)).sum().backward()
        return [x.grad]

    for rank in launch_twice(job, WORLD, tmp_path):
        assert rank[0].tolist() == [6, 6]


def test_a_graph_with_functional_collectives_compiles_as_a_whole(tmp_path):
    from torch.distributed import _functional_collectives as functional

    def layer(x: Tensor, world: int) -> Tensor:
        y = functional.all_reduce(x * 2, "sum", list(range(world)))
        return functional.all_gather_tensor(y + 1, 0, list(range(world))).sin()

    def job(me: RankContext) -> list[Tensor]:
        x = torch.arange(6.0) + me.rank
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        return [compiled(x, me.world), layer(x, me.world)]

    wanted = (sum(torch.arange(6.0) + r for r in range(WORLD)) * 2 + 1).repeat(WORLD).sin()
    for rank in launch_twice(job, WORLD, tmp_path):
        close(rank, [wanted, wanted])


def test_objects_reach_all_ranks(tmp_path):
    def job(me: RankContext) -> list[Any]:
        gathered: list[Any] = [None] * me.world
        dist.all_gather_object(gathered, {"rank": me.rank, "text": "x" * me.rank * 100})
        told = [me.rank, "a"] if me.rank == 1 else [None, None]
        dist.broadcast_object_list(told, 1)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [{r} for r in range(me.world)] if me.rank == 0 else None, 0)
        collected: list[Any] | None = [None] * me.world if me.rank == 2 else None
        dist.gather_object(me.rank, collected, 2)
        return [gathered, told, mine, collected]

    for rank, (gathered, told, mine, collected) in enumerate(launch(job, WORLD, tmp_path)):
        assert gathered == [{"rank": r, "text": "x" * r * 100} for r in range(WORLD)]
        assert told == [1, "a"]
        assert mine == [{rank}]
        assert collected == ([0, 1, 2] if rank == 2 else None)


def test_subgroups_and_split_groups(tmp_path):
    def job(me: RankContext) -> list[float]:
        pair, _ = dist.new_subgroups(2)
        odd = dist.new_group([1, 3], use_local_synchronization=True) if me.rank % 2 else None
        found = []
        for group in (pair, odd):
            x = torch.tensor(10.0**me.rank)
            if group is not None:
                dist.all_reduce(x, group=group)
            found.append(x.item())
        return found

    assert launch(job, 4, tmp_path) == [[11, 1], [11, 1010], [1100, 100], [1100, 1010]]


def test_a_loader_with_workers_reads_each_sample_once(tmp_path):
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(12.0))

    def job(me: RankContext) -> list[Tensor]:
        sampler = DistributedSampler(data, shuffle=True, seed=3)
        loader = DataLoader(data, 2, sampler=sampler, num_workers=2)
        return [x.clone() for (x,) in loader]

    results = launch_twice(job, 2, tmp_path)
    read = torch.cat([x for rank in results for x in rank])
    assert read.sort().values.tolist() == list(range(12))
