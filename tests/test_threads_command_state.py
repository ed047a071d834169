"""What each rank of a script that runs as threads has of its own, and what the process keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from threads_command import assert_printed, ran, ran_text, written

from pycollect.threads import __main__ as command

ROOT = Path(__file__).parents[1]


def test_a_script_has_the_main_module_that_python_gives_it(tmp_path):
    text = """\
        "About."
        import __main__, sys
        names = "__name__", "__file__", "__package__", "__spec__", "__cached__", "__doc__"
        print([globals().get(name) for name in names], sys.argv, sys.path[0], type(__loader__))
        names = sorted({*globals()} - {"__annotations__"})  # not in every version of Python
        print(names, __main__.__dict__ is globals(), __builtins__)
        """
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "link.py").symlink_to(written(tmp_path, text))
    program = str(tmp_path / "linked" / "link.py")
    wanted = subprocess.run(
        [sys.executable, program, "a", "--nproc", "3", "--"], capture_output=True, text=True
    )
    assert wanted.returncode == 0, wanted.stderr
    assert_printed(ran(program, "a", "--nproc", "3", "--"), *wanted.stdout.splitlines() * 2)


@pytest.mark.parametrize("name", ["package", "package.part"])
def test_a_module_has_the_main_module_that_python_gives_it(tmp_path, name):
    text = """
        import sys
        from . import near
        names = "__name__", "__file__", "__package__", "__cached__"
        print([globals().get(name) for name in names], __spec__.name, sys.argv, sys.path[0])
        print(sorted({*globals()} - {"__annotations__"}), near.VALUE)
        """
    for file, content in {
        "__init__": "",
        "near": "VALUE = 3",
        "part": text,
        "__main__": text,
    }.items():
        written(tmp_path / "package", content, f"{file}.py")
    wanted = subprocess.run(
        [sys.executable, "-m", name, "-m", "x"], capture_output=True, text=True, cwd=tmp_path
    )
    assert wanted.returncode == 0, wanted.stderr
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = ran("-m", name, "-m", "x", cwd=tmp_path, env=environ)
    assert_printed(ended, *wanted.stdout.splitlines() * 2)


@pytest.mark.parametrize("options", [(), ("--parallel",)], ids=["turns", "parallel"])
def test_each_rank_has_its_own_view_of_the_environment(tmp_path, options):
    ended = ran_text(
        tmp_path,
        """
        start()
        other = str((rank + 1) % world)
        def check(value):
            mine = os.environ["RANK"], os.getenv("RANK"), os.environ.get("LOCAL_RANK")
            mine += os.environ.copy()["RANK"], dict(os.environ)["RANK"], {**os.environ}["RANK"]
            assert mine == (str(rank),) * 6, mine
            assert "RANK" in os.environ and "RANK" in list(os.environ), list(os.environ)
            assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] == "3"
            assert os.environ.get("MINE") == os.environ.copy().get("MINE") == value
            assert ("MINE" in os.environ) == (value is not None)
            assert len(os.environ) == len(list(os.environ)) == len(os.environ.keys())
            assert "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
            dist.barrier()
        check(None)
        os.environ["MINE"] = f"{rank}"
        check(f"{rank}")
        os.environ.update(MINE=f"{rank} again")
        check(f"{rank} again")
        if rank != 1: del os.environ["MINE"]
        check("1 again" if rank == 1 else None)
        assert os.environ.setdefault("MINE", other) == ("1 again" if rank == 1 else other)
        os.environ.pop("MINE")
        check(None)
        if rank == 0: del os.environ["HOME"]
        dist.barrier()
        assert ("HOME" in os.environ) == (rank != 0)
        """,
        nproc=3,
        options=options,
    )
    assert_printed(ended)


def test_the_process_is_as_before_afterwards(tmp_path, capfd):
    script = written(
        tmp_path,
        """
        import builtins, os, sys
        os.environ["MINE"] = "1"
        sys.argv.append("x")
        sys.path.insert(0, "nowhere")
        sys.stdout = sys.stderr
        builtins.print = None
        """,
    )

    def state():
        return (
            dict(os.environ), type(os.environ), sys.modules["__main__"], sys.argv, sys.argv[:],
            sys.path, sys.path[:], sys.stdout, sys.stderr, print,
        )  # fmt: skip

    before = state()
    for options in ([], ["--parallel"]):
        if options:
            written(tmp_path, "import os; os.environ['MINE'] = '1'")
        assert command.main(["--nproc", "2", *options, script, "a"]) == 0
        assert state() == before
    assert capfd.readouterr() == ("", "")


def test_each_rank_has_arguments_streams_and_print_of_its_own(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        import builtins
        start()
        sys.argv.remove("a")
        sys.path.remove(sys.path[0])
        real = print
        def print_of_rank(*words):
            if rank == 1: real(rank, *words)
        builtins.print = print_of_rank
        dist.barrier()
        print("by rank 1 only", sys.argv[1:])
        if rank: sys.stdout = open(os.devnull, "w")
        dist.barrier()
        sys.stdout.write(f"written by {rank}\\n")
        """,
        "a", "b",
        nproc=3,
    )  # fmt: skip
    assert_printed(ended, "1 by rank 1 only ['b']", "written by 0")


@pytest.mark.parametrize("options", [(), ("--parallel",)], ids=["turns", "parallel"])
def test_classes_of_main_are_pickled(tmp_path, options):
    ended = ran_text(
        tmp_path,
        """
        import io, pickle, threading
        from dataclasses import dataclass
        @dataclass
        class Box:
            value: "int"
        start()
        dist.barrier()
        file = io.BytesIO()
        torch.save({"box": Box(rank)}, file)
        dist.barrier()
        file.seek(0)
        assert torch.load(file, weights_only=False) == {"box": Box(rank)}
        boxes = [Box(5) if rank == 0 else None]
        dist.broadcast_object_list(boxes)
        assert type(boxes[0]) is Box and boxes[0].value == 5
        boxes = [None] * world
        dist.all_gather_object(boxes, Box(rank))
        assert boxes == [Box(r) for r in range(world)]
        def work():
            for _ in range(20):
                assert type(pickle.loads(pickle.dumps(Box(1)))) is Box
                time.sleep(0.001)
            done.append(rank)
        done = []
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(10): dist.barrier()
        thread.join()
        assert done == [rank]
        """,
        nproc=3,
        options=options,
    )
    assert_printed(ended)


def test_each_rank_has_its_own_random_states(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        import random, numpy
        from random import shuffle
        start()
        def seed():
            random.seed(rank)
            numpy.random.seed(rank)
            torch.manual_seed(rank)
        def draw():
            order = list(range(9))
            shuffle(order)
            drawn = random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.ranf()
            return *drawn, torch.rand(1).item(), numpy.random.permutation(9).tolist(), order
        seed()
        wanted = [draw() for _ in range(3)]
        seed()
        dist.barrier()
        for numbers in wanted:
            drawn = draw()
            assert drawn == numbers, (drawn, numbers)
            dist.barrier()
        """,
        nproc=3,
    )
    assert_printed(ended)


def test_handlers_of_operators_are_a_ranks_or_an_imported_modules(tmp_path):
    """A rank imports DTensor, with the handlers that `loss_parallel` changes, for all ranks."""
    written(
        tmp_path,
        """
        from torch.distributed.tensor import DTensor
        DTensor._op_dispatcher._custom_op_handlers["of a module"] = 1
        """,
        "registers.py",
    )
    ended = ran_text(
        tmp_path,
        """
        assert rank > 0 or "torch.distributed.tensor" not in sys.modules
        start()
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel
        def count(): return len(DTensor._op_dispatcher._custom_op_handlers)
        before = count()
        dist.barrier()
        with loss_parallel():
            dist.barrier()
            inside = count()
        dist.barrier()
        import registers
        dist.barrier()
        assert before < inside and count() == before + 1, (before, inside, count())
        if rank == 1:
            DTensor._op_dispatcher._custom_op_handlers["of a rank"] = 1
        dist.barrier()
        print(rank, count() - before)
        """,
    )
    assert_printed(ended, "0 1", "1 2")
