"""What torch and Python have once in a process, used by ranks that are threads."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within, total
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pycollect import threads


def profile(rank: int, world: int) -> None:
    with torch.profiler.profile():
        dist.barrier()


@PARALLEL
def test_a_second_profiler_is_refused(parallel):
    """It ended the process."""
    with pytest.raises(RuntimeError, match=r"the profiler.*profile in one rank"):
        threads.launch(profile, 2, timeout=20, parallel=parallel)


def test_the_caller_may_profile_instead_of_the_ranks():
    with torch.profiler.profile() as found:
        with pytest.raises(RuntimeError, match=r"the profiler, which another thread has"):
            threads.launch(profile, 1, timeout=20)
        torch.ones(1) + 1
    assert found.events()
    threads.launch(profile, 1, timeout=20)


def test_ranks_may_profile_one_after_the_other():
    def program(rank: int, world: int) -> int:
        count = 0
        for profiling in range(world):
            profiler: Any = torch.profiler.profile if rank == profiling else contextlib.nullcontext
            with profiler() as found:
                dist.all_reduce(torch.ones(2))
            count += len(found.events()) if found is not None else 0
            dist.barrier()
        return count

    assert min(threads.launch(program, 2, timeout=20)) > 0


def scaled(name: str, factor: float) -> float:
    """Define an operator, and return the result of a call."""

    @torch.library.custom_op(f"pycollect_tests::{name}", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    dist.barrier()
    found: float = scale(torch.ones(1)).item()
    return found


def test_an_operator_of_another_rank_is_refused():
    """A second definition ended the process, because it destroys the first one."""
    with pytest.raises(RuntimeError, match=r"pycollect_tests::twice.*in a module that the ranks"):
        threads.launch(lambda rank, world: scaled("twice", 2), 2, timeout=20)
    own = threads.launch(lambda rank, world: [scaled(f"own{rank}", n) for n in (2, 3)], 2)
    assert own == [[2.0, 3.0]] * 2


def test_fake_tensors_outlive_the_first_rank_that_makes_them():
    """Where a torch with CUDA found no GPU, the second launch ended the process."""

    def program(rank: int, world: int) -> torch.Size:
        with FakeTensorMode():
            found = torch.empty(2, 3)
        return found.shape

    for _ in range(3):
        assert threads.launch(program, 2, timeout=20) == [(2, 3)] * 2


def test_detailed_debugging():
    """torch would make a group of gloo, in which rank 0 would wait and keep its turn."""
    level = dist.get_debug_level()

    def program(rank: int, world: int) -> float:
        dist.init_process_group("gloo")
        return total(rank, world)

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with ends_within(5):
            assert threads.launch(program, 2, timeout=20) == [1.0, 1.0]
    finally:
        dist.set_debug_level(level)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functions_first_imported_by_a_rank_have_no_group_of_it(monkeypatch):
    """Their default argument `group.WORLD` was the group of the rank that imported them."""
    for name in ("torch.distributed.nn.functional", "torch.distributed.nn"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def program(rank: int, world: int) -> list[float]:
        import torch.distributed.nn.functional as differentiable

        x = torch.full((2,), rank + 1.0, requires_grad=True)
        (differentiable.all_reduce(x) * (rank + 1)).sum().backward()
        found: list[float] = x.grad.tolist()
        return found

    assert threads.launch(program, 3, timeout=20) == [[6, 6]] * 3


def test_each_rank_has_its_own_output_and_warning_filters():
    def program(rank: int, world: int) -> tuple[str, bool, bool]:
        text, raised = io.StringIO(), False
        with contextlib.redirect_stdout(text), warnings.catch_warnings():
            warnings.simplefilter("error" if rank == 0 else "ignore")
            dist.barrier()
            print(f"printed by rank {rank}")
            try:
                warnings.warn("by a rank", stacklevel=1)
            except UserWarning:
                raised = True
            dist.barrier()
        dist.barrier()
        return text.getvalue(), raised, sys.stdout is text

    found = threads.launch(program, 3, timeout=20)
    assert found == [(f"printed by rank {r}\n", r == 0, False) for r in range(3)]


def handlers() -> dict[Any, Any]:
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return found


def in_loss_parallel() -> bool:
    return torch.ops.aten.nll_loss_backward.default in handlers()


@PARALLEL
def test_a_rank_is_in_loss_parallel_while_others_are_not(parallel):
    """The handlers of operators were the process's, and the last rank to leave failed. A rank may
    also assign a table, and then the process's, as `context_parallel` does."""

    def program(rank: int, world: int) -> list[bool]:
        found = []
        with contextlib.ExitStack() as stack:
            for step in range(2 * world):
                if step == rank:
                    stack.enter_context(tp.loss_parallel())
                if step == 2 * rank + 1:
                    stack.close()
                dist.barrier()
                found.append(in_loss_parallel())
        if rank == 1:
            with contextlib.suppress(KeyError), tp.loss_parallel():
                raise KeyError  # torch leaves the handlers where they are then
        dist.barrier()
        found.append(rank != 1 and in_loss_parallel())
        for value in ({**handlers(), "mine": rank}, table):
            DTensor._op_dispatcher._custom_op_handlers = value
            dist.barrier()
            found.append(handlers().get("mine") == rank)
        handlers()["mine"] = rank
        dist.barrier()
        found.append(handlers()["mine"] == rank)
        handlers().clear()  # torch's own, too
        return [*found, not handlers()]

    table, before = handlers(), dict(handlers())
    for _ in range(2):
        found = threads.launch(program, 3, timeout=20, parallel=parallel)
        for rank in range(3):
            inside = [rank <= step < 2 * rank + 1 for step in range(6)]
            assert found[rank] == [*inside, False, True, False, True, True]
    assert handlers() is table
    assert table == before


def test_a_torch_without_handlers_of_operators_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delitem(vars(DTensor._op_dispatcher), "_custom_op_handlers")
        with pytest.raises(RuntimeError, match=r"need .*_custom_op_handlers, which torch"):
            threads.launch(total, 2, timeout=20)
    assert threads.launch(total, 2, timeout=20) == [1.0, 1.0]


def communicated(mode: Any) -> dict[str, int]:
    counts = mode.comm_module_counts.items()
    return {name: sum(n["forward"].values()) for name, n in counts}


def computed(mode: Any) -> dict[str, int]:
    return {name: sum(n.values()) for name, n in mode.get_flop_counts().items()}


class Summed(torch.nn.Module):
    """Lets other ranks run while its hooks are between their beginning and their end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x


@pytest.mark.parametrize(
    ("make", "counts", "wanted"),
    [
        (CommDebugMode, communicated, {"": 1, ".1": 1}),
        (lambda: FlopCounterMode(display=False), computed, {"": 192, ".0": 64, ".2": 128}),
    ],
)
def test_a_mode_follows_the_modules_of_its_rank(make, counts, wanted):
    """It met the modules of other ranks, because its hooks were on all modules of the process."""

    def program(rank: int, world: int) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Summed(), torch.nn.Linear(4, 8))
        with make() as mode:
            model(torch.ones(2, 4))
        dist.barrier()
        return counts(mode)

    of_modules = {f"Sequential{name}": n for name, n in wanted.items()}
    for found in threads.launch(program, 3, timeout=20):
        assert {name: n for name, n in found.items() if name != "Global"} == of_modules


CHECKPOINTS = ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")


@pytest.mark.parametrize(
    ("module", "name"), [*((checkpoint, name) for name in CHECKPOINTS), (_random, "_rng_tracker")]
)
def test_each_rank_has_its_own_variable(module, name):
    """With the setting of activation checkpoints, a rank left that of another in the process."""

    def program(rank: int, world: int) -> list[Any]:
        found = [getattr(module, name)]
        for step in range(3):
            setattr(module, name, f"{step} of rank {rank}")
            dist.barrier()
            found.append(getattr(module, name))
        return found

    before = getattr(module, name)
    wanted = [[before, *(f"{step} of rank {rank}" for step in range(3))] for rank in range(3)]
    assert threads.launch(program, 3, timeout=20) == wanted
    assert getattr(module, name) is before


class Late(torch.nn.Module):
    """Ends the forward of a later rank before that of rank 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in range(1, dist.get_world_size()):
            if dist.get_rank() == 0:
                dist.recv(torch.empty(1), other)
        assert DDP._get_active_ddp_module().module[1] is self
        return x


@PARALLEL
def test_each_rank_has_its_own_active_ddp_module(parallel):
    """It was left set, so that code compiled later was divided by the buckets of that module."""

    def program(rank: int, world: int) -> Any:
        DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), Late()))(torch.ones(1, 2))
        if rank > 0:
            dist.send(torch.ones(1), 0)
        return DDP._get_active_ddp_module()

    assert threads.launch(program, 3, parallel=parallel, timeout=20) == [None] * 3
    assert DDP._get_active_ddp_module() is None
