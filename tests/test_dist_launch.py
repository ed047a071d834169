"""Ways to launch programs: torchrun, spawn, fork, and libraries that launch or divide models, where
they are installed.

Each program starts with torch imported, in its own session, which is killed on a hang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import programs
import pytest
from dist_pool import BACKEND

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
BEGIN = f"""
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
if {BACKEND!r} == "pycollect": import pycollect
"""
WORK = """
def work():
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(x)
    assert x.eq(world * (world + 1) / 2).all()
    names = [None] * world
    dist.all_gather_object(names, rank)
    assert names == list(range(world))
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    os.write(1, f"rank {rank} of {world} is right\\n".encode())
"""
PROGRAM = f"""{BEGIN}{WORK}
dist.init_process_group({BACKEND!r})
work()
dist.destroy_process_group()
"""
START_METHODS = f"""{BEGIN}{WORK}
import torch.multiprocessing as mp
def body(rank, world, where):
    dist.init_process_group({BACKEND!r}, init_method=where, rank=rank, world_size=world)
    work()
    dist.destroy_process_group()
if __name__ == "__main__":
    how, where = sys.argv[1:3]
    if how == "spawn":
        mp.spawn(body, (2, where), nprocs=2)
    else:
        mp.start_processes(body, (2, where), nprocs=2, start_method=how)
"""


def written(folder: Path, text: str) -> str:
    program = folder / "program.py"
    program.write_text(text)
    return str(program)


def assert_two_ranks_succeed(*arguments: str) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = programs.run([sys.executable, *arguments], timeout=120, env=environ)
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 is right" in output, output
    for word in ("Traceback", "terminate", "leaked"):
        assert word not in output, output


# README's program, which test_documents.py runs, exits without destroying its group.
def test_torchrun(tmp_path):
    assert_two_ranks_succeed(*TORCHRUN, written(tmp_path, PROGRAM))


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_start_methods(tmp_path, how):
    assert_two_ranks_succeed(written(tmp_path, START_METHODS), how, f"file://{tmp_path}/store")


ACCELERATE = f"""{BEGIN}{WORK}
from accelerate import Accelerator
dist.init_process_group({BACKEND!r})  # otherwise Accelerator chooses the backend
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
assert dist.get_backend() == {BACKEND!r}
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(3, 4)).sum())
assert accelerator.gather(torch.ones(2)).numel() == 2 * accelerator.num_processes
work()
"""
LIGHTNING = f"""{BEGIN}
import lightning as L
strategy = L.fabric.strategies.DDPStrategy(process_group_backend={BACKEND!r})
fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
if __name__ == "__main__":
    fabric.launch()
    assert dist.get_backend() == {BACKEND!r}
    assert fabric.all_reduce(torch.ones(2), reduce_op="sum").sum() == 4
    os.write(1, f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} is right\\n".encode())
"""


def require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library} to run this")


def test_accelerate(tmp_path):
    require("accelerate")
    assert_two_ranks_succeed(*TORCHRUN, written(tmp_path, ACCELERATE))


def test_lightning(tmp_path):
    require("lightning")
    assert_two_ranks_succeed(written(tmp_path, LIGHTNING))


# A tiny Llama with random weights; divided, it gives the results of the whole one to rounding.
LLAMA = f"""
import os, sys
import torch, torch.distributed as dist
import pycollect, pycollect.threads
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
BACKEND, FOLDER = {BACKEND!r}, sys.argv[-1]


def undivided():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=256, vocab_size=256, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def check(model, whole):
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-5, atol=1e-6)
        found, wanted = (
            each.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
            for each in (model, whole)
        )
    assert found.equal(wanted)
    os.write(1, f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} is right\\n".encode())
"""
TRANSFORMERS = f"""{LLAMA}
from transformers.distributed import DistributedConfig


def work(rank=None, world=None):
    config = DistributedConfig(tp_plan="auto")
    model = LlamaForCausalLM.from_pretrained(FOLDER, distributed_config=config)
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.to_local().shape == (64, 128)
    assert dist.get_backend(weight.device_mesh.get_group()) == BACKEND
    check(model, undivided())


if sys.argv[1] == "threads":
    undivided().save_pretrained(FOLDER)
    pycollect.threads.launch(work, 2)
else:
    dist.init_process_group(BACKEND)  # otherwise transformers chooses gloo
    if dist.get_rank() == 0:
        undivided().save_pretrained(FOLDER)
    dist.barrier()
    work()
    dist.destroy_process_group()
"""
DEEPSPEED = f"""{LLAMA}
import deepspeed

# Otherwise DeepSpeed compiles an op of its own, and sums by it instead of torch.distributed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(BACKEND)
assert dist.get_backend() == BACKEND
parallel = {{"tp_size": 2}}
engine = deepspeed.init_inference(undivided(), tensor_parallel=parallel, dtype=torch.float32)
assert engine.module.model.layers[0].mlp.down_proj.weight.shape == (64, 128)
check(engine, undivided())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks_are", ["processes", "threads"])
def test_transformers(tmp_path, ranks_are):
    require("transformers")
    launcher = TORCHRUN if ranks_are == "processes" else ()
    program = written(tmp_path, TRANSFORMERS)
    assert_two_ranks_succeed(*launcher, program, ranks_are, str(tmp_path / "model"))


def test_deepspeed(tmp_path):
    require("transformers")
    require("deepspeed")
    assert_two_ranks_succeed(*TORCHRUN, written(tmp_path, DEEPSPEED))
