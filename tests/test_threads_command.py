"""Scripts that are written for torchrun have, as threads, what they have as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dist_process import own_process
from threads_command import TIMEOUT, assert_printed, ran, ran_text, written

from pycollect.threads import __main__ as command

ROOT = Path(__file__).parents[1]
NOTICE = "pycollect.threads: backend 'pycollect' serves"
TRAINING = """
import argparse, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("rate", type=float)
    return parser.parse_args()

def main(args):
    if args.backend == "pycollect":
        import pycollect
    dist.init_process_group(args.backend)
    torch.manual_seed(7 + dist.get_rank())
    layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    data = torch.arange(120.0).sin().reshape(20, 6)
    data = TensorDataset(data, (data.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            sys.stdout.write(f"{os.environ['LOCAL_RANK']} {epoch} {loss.item()!r}\\n")
    norm = sum(p.sum().item() for p in model.parameters())
    sys.stdout.write(f"{os.environ['LOCAL_RANK']} {dist.get_world_size()} {norm!r}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(parse())
"""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_training_script_prints_the_same_twice(tmp_path, backend):
    script = written(tmp_path, TRAINING)
    runs = [
        ran(script, "--backend", backend, "--epochs=2", "0.1", env=ONE_THREAD) for _ in range(2)
    ]
    for ended in runs:
        assert ended.returncode == 0, ended.stderr
        notices = [line for line in ended.stderr.splitlines() if line.startswith(NOTICE)]
        assert len(notices) == 1
        assert notices[0].startswith(f"{NOTICE} {backend!r}, because ")
    assert len(runs[0].stdout.splitlines()) == 2 * (2 * 2 + 1)
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.slow
def test_a_training_script_prints_the_numbers_of_torchrun(tmp_path):
    program = [written(tmp_path, TRAINING), "--backend=pycollect", "--epochs", "3", "0.1"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    wanted = own_process([*torchrun, *program], TIMEOUT, PYTHONPATH=str(ROOT))
    ended = ran(*program, env=ONE_THREAD)
    assert sorted(ended.stdout.splitlines()) == sorted(wanted.splitlines()), ended.stderr
    assert len(wanted.splitlines()) == 2 * (3 * 2 + 1)


def test_output_is_in_the_order_of_turns(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        print("begin", rank)
        start()
        for step in range(2):
            dist.all_reduce(torch.ones(1))
            print(step, rank)
        """,
        nproc=3,
    )
    assert ended.stdout.split("\n")[:3] == ["begin 0", "begin 1", "begin 2"]
    assert sorted(ended.stdout.splitlines()[3:6]) == ["0 0", "0 1", "0 2"]
    assert ended.stdout == ran(str(tmp_path / "program.py"), nproc=3).stdout


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


@pytest.mark.cuda
def test_all_ranks_choose_the_gpu_of_the_command(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        start()
        x = torch.full((3,), float(rank), device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        print(x.device)
        """,
        nproc=3,
        options=("--device", "cuda:0"),
    )
    assert_printed(ended, *["cuda:0"] * 3)


def test_worker_processes_of_a_data_loader_belong_to_the_rank(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor([i, int(os.environ["RANK"])])
        start()
        for batch in DataLoader(Numbers(), batch_size=2, num_workers=1):
            dist.all_reduce(batch)
            if rank == 0: print(batch.tolist())
        """,
    )
    assert_printed(ended, "[[0, 1], [2, 1]]", "[[4, 1], [6, 1]]")


def test_each_rank_compiles_with_its_own_globals(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        start()
        OWN = 10 * rank
        def helper(x): return x + OWN
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph
        @torch.compile(backend=backend)
        def step(x): return helper(x) * 2
        for _ in range(3):
            y = step(torch.ones(1))
            dist.barrier()
        assert y.item() == 2 + 20 * rank and len(graphs) == 1, (y, graphs)
        """,
        nproc=3,
    )
    assert_printed(ended)


@pytest.mark.slow
def test_compiled_code_of_the_cpu_runs(tmp_path):
    ended = ran_text(
        tmp_path,
        """
        start()
        y = torch.compile(lambda x: x * 2 + rank)(torch.ones(3))
        assert y.tolist() == [2.0 + rank] * 3
        """,
    )
    assert ended.returncode == 0, ended.stderr  # torch may warn that it finds no GPU
