"""examples/vllm_plugin: collectives of uneven sizes for vLLM's CPU workers, and their registration.

The tests use vLLM where it is installed, else the part of its interface in vllm_interface.py.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_interface
from dist_pool import OURS, Caught, RankContext, caught, fresh
from reference import assert_same
from sites import PROCESSES, only_on
from torch import Tensor

import pycollect

pytestmark = [
    pytest.mark.skipif(not OURS, reason="the plugin is for pycollect's groups"),
    only_on(PROCESSES, "vLLM's workers are processes"),
]
SIZES = {1: [(3,)], 2: [(3, 1), (0, 2), (2, 2), (0, 0)], 3: [(0, 5, 1)], 4: [(1, 0, 0, 4)]}
HIDDEN = (torch.bfloat16, torch.float32)
SHAPE = (4, 3, 2)


def randoms(rows: int, dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    shape = list(SHAPE)
    shape[dim] = rows
    generator = torch.Generator().manual_seed(seed)
    return (100 * torch.randn(shape, generator=generator)).to(dtype)


def gather_and_scatter(me: RankContext) -> None:
    made = vllm_interface.communicator()
    assert made.supports_tensor_dict
    for sizes, dim, dtype in itertools.product(SIZES[me.world], (0, 1, -1), (*HIDDEN, torch.int32)):
        parts = [randoms(rows, dim, dtype, r) for r, rows in enumerate(sizes)]
        whole = made.all_gatherv(parts[me.rank], dim, list(sizes))
        assert_same([whole], [torch.cat(parts, dim)], f"all_gatherv {sizes}")

        inputs = [randoms(sum(sizes), dim, dtype, 10 + r) for r in range(me.world)]
        total = inputs[0].to(torch.float32 if dtype.is_floating_point else dtype)
        for other in inputs[1:]:
            total = total + other
        chunk = total.to(dtype).split(list(sizes), dim)[me.rank]
        got = made.reduce_scatterv(inputs[me.rank], dim, list(sizes))
        assert_same([got], [chunk], f"reduce_scatterv {sizes}")
        assert_same([inputs[me.rank]], [randoms(sum(sizes), dim, dtype, 10 + me.rank)], "input")
        if len({*sizes}) == 1:
            assert_same([made.all_gatherv(parts[me.rank], dim)], [whole], "equal sizes")
            assert_same([made.reduce_scatterv(inputs[me.rank], dim)], [chunk], "equal sizes")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_sizes(pools, world):
    pools(world).run(gather_and_scatter)


def tensors_of(rank: int, rows: int) -> list[Tensor]:
    """Hidden states, and the router's weights and experts, as vLLM dispatches them."""
    return [
        torch.full((rows, 8), 1.0 + rank, dtype=torch.bfloat16),
        torch.full((rows, 2), 2.0 + rank),
        torch.full((rows, 2), 3 + rank, dtype=torch.int32),
    ]


def dispatch(me: RankContext) -> None:
    made, sizes = vllm_interface.communicator(), [3, 0, 2][: me.world]
    got = made.all_gatherv(tensors_of(me.rank, sizes[me.rank]), 0, sizes)
    assert isinstance(got, list)
    expected = zip(*(tensors_of(r, rows) for r, rows in enumerate(sizes)), strict=True)
    assert_same(got, [torch.cat(each) for each in expected], "several tensors")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_several_tensors_in_one_call(pools, world):
    pools(world).run(dispatch)


def wrong(me: RankContext) -> dict[str, tuple[Caught, bool]]:
    made = vllm_interface.communicator()
    x, sizes, odd = torch.ones(2, 3), [2, 2, 2], me.rank == 1
    calls: dict[str, Any] = {
        "rows": lambda: made.all_gatherv(x[odd:], 0, sizes),
        "rows of one tensor": lambda: made.all_gatherv([x, x[odd:]], 0, sizes),
        "other sizes": lambda: made.all_gatherv(x, 0, [2, 2, 1] if odd else sizes),
        "too many sizes": lambda: made.all_gatherv(x, 0, [2, 2, 2, 0]),
        "no common size": lambda: made.all_gatherv(x[odd:], 0),
        "a row too many": lambda: made.reduce_scatterv(torch.ones(7, 3), 0, sizes),
        "a row too few": lambda: made.reduce_scatterv(torch.ones(5, 3), 0, sizes),
        "rows of one rank": lambda: made.reduce_scatterv(torch.ones(6 + odd, 3), 0, sizes),
        "not divisible": lambda: made.reduce_scatterv(torch.ones(7, 3), 0),
    }
    return {
        what: (caught(call), made.all_gatherv(x, 0, sizes).shape == (6, 3))
        for what, call in calls.items()
    }


def test_wrong_sizes_raise_on_every_rank_and_the_group_stays_usable(pools):
    for found in pools(3).run(wrong):
        for what, (error, usable) in found.items():
            assert (error.kind, usable) == ("ValueError", True), (what, error)


def pass_on(me: RankContext) -> None:
    made = vllm_interface.communicator()
    sent = {"hidden": torch.ones(2, 3), "none": torch.ones(0, 4), "ids": torch.arange(3)}
    if me.rank == 0:
        made.send_tensor_dict(sent, dst=1)
    elif me.rank == 1:
        got = made.recv_tensor_dict(src=0)
        assert list(got) == list(sent)
        assert_same([*got.values()], [*sent.values()], "tensor dict")


def test_a_tensor_dict_is_passed_on(pools):
    pools(2).run(pass_on)


def register(me: RankContext) -> None:
    plugin = vllm_interface.plugin()
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda self: False)
        plugin.register()
        assert current_platform.dist_backend == "gloo"
    for _ in range(2):  # vLLM may call it several times
        plugin.register()
        assert current_platform.dist_backend == "pycollect"
        module, _, name = current_platform.get_device_communicator_cls().rpartition(".")
        assert getattr(importlib.import_module(module), name) is type(vllm_interface.communicator())


def test_registration(pools):
    pools(1).run(register)
    project = (vllm_interface.PLUGIN / "pyproject.toml").read_text()
    assert 'vllm.general_plugins"]\npycollect = "pycollect_vllm:register"' in project


def on_gloo(me: RankContext) -> Caught:
    me.init("gloo")
    return caught(vllm_interface.communicator)


def test_a_group_of_another_backend_is_an_error():
    with fresh(2, backend="gloo", group=False) as pool:
        for error in pool.run(on_gloo):
            assert error.kind == "RuntimeError"
            assert "made the group 'ep:0' with 'gloo'" in error.text


GENERATE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], tensor_parallel_size=2, load_format="dummy", skip_tokenizer_init=True,
        dtype="bfloat16", max_model_len=64, kv_cache_memory_bytes=1 << 26,
        gpu_memory_utilization=0.05, enforce_eager=True,
    )
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": [5, 7, 11]}], sampling, use_tqdm=False)
    print("TOKENS", found.outputs[0].token_ids)
"""
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not vllm_interface.INSTALLED, reason="needs vLLM (and not its interface alone)")
def test_vllm_generates_the_same_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "program.py").write_text(GENERATE)
    installed = tmp_path / "pycollect_vllm-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: pycollect-vllm\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\npycollect = pycollect_vllm:register\n"
    )
    path = [tmp_path, vllm_interface.PLUGIN, Path(pycollect.__file__).parent.parent]
    environ = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    tokens = {}
    for plugins in ("pycollect", "none"):
        command, used = [sys.executable, "program.py", "."], environ | {"VLLM_PLUGINS": plugins}
        pipes = {"capture_output": True, "text": True, "cwd": tmp_path}
        ran = subprocess.run(command, env=used, timeout=300, **pipes)
        output = ran.stdout + ran.stderr
        assert ran.returncode == 0, output[-4000:]
        assert ("backend=pycollect" in output) == (plugins == "pycollect")
        (tokens[plugins],) = re.findall("TOKENS (.*)", output)
    assert tokens["pycollect"] == tokens["none"]
