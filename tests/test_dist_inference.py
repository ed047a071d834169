"""Tensor-parallel inference by other libraries, if they are installed: transformers, DeepSpeed.

Each divides a tiny Llama with random weights; its outputs equal the undivided model's to rounding.
"""

from __future__ import annotations

import pytest
from dist_pool import BACKEND
from dist_process import own_process
from test_dist_launch import assert_ranks_succeeded, require, written

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
BEGIN = f"""
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
TRANSFORMERS = f"""{BEGIN}
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
DEEPSPEED = f"""{BEGIN}
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
    output = own_process([*launcher, program, ranks_are, str(tmp_path / "model")], 120)
    assert_ranks_succeeded(output, 2)


def test_deepspeed(tmp_path):
    require("transformers")
    require("deepspeed")
    output = own_process([*TORCHRUN, written(tmp_path, DEEPSPEED)], 120)
    assert_ranks_succeeded(output, 2)
