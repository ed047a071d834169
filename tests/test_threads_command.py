"""The command `python -m pycollect.threads`: a script for torchrun has what it has as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import Program, run

from pycollect.threads import __main__ as command

ROOT = Path(__file__).parents[1]
TIMEOUT = 120  # generous, because the machine may be busy
AT_ONCE = 30  # a launch that cannot end waits for a timeout of minutes, or for ever
COMMAND = [sys.executable, "-m", "pycollect.threads"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
BEGIN = """\
import os, sys, time
import torch, torch.distributed as dist
def start(): dist.init_process_group("pycollect")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def written(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


def ran(*arguments: str, nproc: int = 2, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return run([*COMMAND, "--nproc", str(nproc), *arguments], timeout=TIMEOUT, **more)


@pytest.fixture
def ran_here(tmp_path, capfd):
    """Run a text as a script in this process; return the status and the printed lines."""

    def ran_text(text, *arguments, nproc=2, options=()):
        script = written(tmp_path, BEGIN + textwrap.dedent(text))
        status = command.main(["--nproc", str(nproc), *options, script, *arguments])
        printed = capfd.readouterr()
        return status, printed.out.splitlines(), printed.err.splitlines()

    return ran_text


# --- a script for torchrun ------------------------------------------------------------------------

SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycollect  # registers the default backend below

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="pycollect")
args = parser.parse_args()

dist.init_process_group(args.backend)
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}, rank {rank}: {loss.item():.6f}")
dist.destroy_process_group()
"""
STEP = re.compile(r"step \d, rank \d: \d+\.\d{6}")  # a line of the script
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_script_for_torchrun_prints_its_numbers(tmp_path):
    script = written(tmp_path, SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    wanted = run(
        [sys.executable, *torchrun, script], timeout=TIMEOUT, env=os.environ | ONE_THREAD
    ).stdout
    ended = ran(script, env=os.environ | ONE_THREAD)
    # Lines of torchrun's processes may lack the newline between them.
    assert sorted(ended.stdout.splitlines()) == sorted(STEP.findall(wanted)), ended.stderr


@pytest.mark.cuda
def test_all_ranks_choose_the_gpu_of_the_command(ran_here):
    text = """
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        start()
        x = torch.full((3,), float(rank), device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        print(x.device)
        """
    printed = ran_here(text, nproc=3, options=("--device", "cuda:0"))
    assert printed == (0, ["cuda:0"] * 3, [])


# --- what each rank has of its own ----------------------------------------------------------------

MAIN = """
    "About."
    import __main__, sys
    from near import VALUE
    names = "__name__", "__file__", "__package__", "__cached__", "__doc__"
    print([globals().get(name) for name in names], sys.argv, sys.path[0], type(__loader__))
    print(__spec__ and __spec__.name, __builtins__, __main__.__dict__ is globals())
    print(sorted({*globals()} - {"__annotations__"}))  # not in every version of Python
    """


@pytest.mark.parametrize("name", ["linked/link.py", "package", "package.part"])
def test_a_script_has_the_main_module_that_python_gives_it(tmp_path, name):
    for file in ("near.py", "package/near.py", "package/__init__.py"):
        written(tmp_path, "VALUE = 3", file)
    written(tmp_path, MAIN, "program.py")
    for file in ("package/part.py", "package/__main__.py"):
        written(tmp_path, MAIN.replace("from near", "from .near"), file)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "link.py").symlink_to(tmp_path / "program.py")
    program = [name, "-m", "x", "--nproc", "3", "--"]
    program = program if name.endswith(".py") else ["-m", *program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    wanted = subprocess.check_output([sys.executable, *program], text=True, cwd=tmp_path)
    ended = ran(*program, cwd=tmp_path, env=environ)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, wanted * 2, "")


SCRIPTS = {
    "globals of compiled code": """
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
    "worker processes": """
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor([i, int(os.environ["RANK"])])
        for n, batch in enumerate(DataLoader(Numbers(), batch_size=2, num_workers=1)):
            assert batch.tolist() == [[2 * n, rank], [2 * n + 1, rank]]
            dist.barrier()
        """,
    "random states": """
        import random, numpy
        from random import shuffle
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
        for numbers in wanted:
            dist.barrier()
            drawn = draw()
            assert drawn == numbers, (drawn, numbers)
        """,
    "classes": """
        import io, pickle, threading
        from dataclasses import dataclass
        @dataclass
        class Box:
            value: "int"
        file = io.BytesIO()
        torch.save({"box": Box(rank)}, file)
        dist.barrier()
        file.seek(0)
        assert torch.load(file, weights_only=False) == {"box": Box(rank)}
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
}


@pytest.mark.parametrize(
    ("what", "options"), [*((what, ()) for what in SCRIPTS), ("classes", ("--parallel",))]
)
def test_each_rank_has_its_own(ran_here, what, options):
    text = "start()\ndist.barrier()\n" + textwrap.dedent(SCRIPTS[what])
    assert ran_here(text, nproc=3, options=options) == (0, [], [])


def test_each_rank_has_arguments_streams_and_print_of_its_own(ran_here):
    text = """
        import builtins, io
        start()
        sys.argv.remove("a")
        sys.path.remove(sys.path[0])
        real = print
        def print_of_rank(*words):
            if rank == 1: real(rank, *words)
        builtins.print = print_of_rank
        dist.barrier()
        print("by rank 1 only", sys.argv[1:])
        if rank: sys.stdout = io.StringIO()
        dist.barrier()
        sys.stdout.write(f"written by {rank}\\n")
        """
    assert ran_here(text, "a", "b", nproc=3) == (0, ["1 by rank 1 only ['b']", "written by 0"], [])


@pytest.mark.parametrize("options", [(), ("--parallel",)])
def test_the_process_is_as_before_afterwards(ran_here, options):
    def state():
        return (
            dict(os.environ), type(os.environ), sys.modules["__main__"], sys.argv, sys.argv[:],
            sys.path, sys.path[:], sys.stdout, sys.stderr, print,
        )  # fmt: skip

    text = "os.environ['MINE'] = '1'\n"
    if not options:
        text += "import builtins; builtins.print, sys.stdout = None, sys.stderr\n"
        text += "sys.argv.append('x'); sys.path.insert(0, 'nowhere')\n"
    before = state()
    assert ran_here(text, "a", options=options) == (0, [], [])
    assert state() == before


def test_handlers_of_operators_are_a_ranks_or_an_imported_modules(tmp_path):
    """A rank imports DTensor, with the handlers that `loss_parallel` changes, for all ranks."""
    register = "DTensor._op_dispatcher._custom_op_handlers"
    text = f"""
        from torch.distributed.tensor import DTensor
        {register}["of a module"] = 1
        """
    written(tmp_path, text, "registers.py")
    text = f"""
        assert rank > 0 or "torch.distributed.tensor" not in sys.modules
        assert sys.stdout is sys.__stdout__
        start()
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel
        def count(): return len({register})
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
            {register}["of a rank"] = 1
        dist.barrier()
        print(rank, count() - before)
        """
    ended = ran(written(tmp_path, BEGIN + textwrap.dedent(text)))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0 1\n1 2\n", "")


# --- how it ends ----------------------------------------------------------------------------------

STOPPED = "pycollect.threads: sys.exit with status {}, raised by rank 1 of 2"


@pytest.mark.parametrize(
    ("statement", "status", "error"),
    [
        *((statement, 0, []) for statement in ("", "sys.exit()", "if rank == 1: sys.exit(0)")),
        ("if rank == 1: sys.exit(3)", 3, [STOPPED.format(3)]),
        ("if rank == 1: sys.exit(256)", 1, [STOPPED.format(1)]),
        ("if rank == 1: sys.exit('bye')", 1, ["bye", STOPPED.format(1)]),
        ("raise KeyboardInterrupt", 130, ["interrupted"]),
    ],
)
def test_the_exit_status_is_the_one_of_the_first_rank_that_fails(
    ran_here, statement, status, error
):
    assert ran_here(f"start()\n{statement}\n") == (status, [], error)


def test_an_exception_is_printed_with_its_rank_and_the_frames_of_the_script(ran_here, tmp_path):
    text = """
        def step():
            if rank == 1: raise ValueError("bad value")
            dist.barrier()
        start()
        step()
        """
    status, _, (first, *lines) = ran_here(text, nproc=3)
    assert (status, first) == (1, "Traceback (most recent call last):")
    file = f'  File "{tmp_path}/program.py"'
    frames = [line for line in lines if line.startswith("  File")]
    assert frames == [f"{file}, line 10, in <module>", f"{file}, line 7, in step"]
    if sys.version_info >= (3, 11):
        lines = lines[lines.index("ValueError: bad value") + 1 :]
    assert lines[0] == "raised by rank 1 of 3"
    assert any(line.startswith("rank 0 raised PeerLost: ") for line in lines)


def test_errors_of_compilation_are_printed_as_by_python(tmp_path):
    script = written(tmp_path, "x = (")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    ended = ran(script)
    assert (ended.returncode, ended.stderr) == (1, plain.stderr)


@pytest.mark.parametrize(
    ("statement", "options", "words"),
    [
        ("if rank == 0: dist.recv(torch.ones(3), 1)", (),
         ("Deadlock: ", "rank 0 waits for recv", "program.py:6 ", "program.py:7 ")),
        ("while rank == 1: time.sleep(0.01)", ("--timeout", "0.3"),
         ("Timeout: launch: the launch has not ended within its timeout", "program.py:6 ")),
        ("if rank == 1: sys.exit(0)", (),
         ("PeerLost: barrier #0", "rank 1 has left", "raised by rank 0 of 2")),
    ],
    ids=["deadlock", "timeout", "early end"],
)  # fmt: skip
def test_ranks_that_cannot_end_are_named_with_their_lines(tmp_path, statement, options, words):
    script = written(tmp_path, f"{BEGIN}start()\n{statement}\ndist.barrier()\n")
    with Program([*COMMAND, "--nproc", "2", *options, script], **PIPES) as process:
        _, errors = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 1
    assert all(word in errors for word in words), errors
    assert ("Traceback" in errors) == ("Timeout" not in errors)


def interrupted(folder: Path, text: str, nproc: int) -> tuple[int, str]:
    """Send Ctrl-C to a script that has printed "ready"; return its status and its errors."""
    script = written(folder, BEGIN + text)
    with Program([*COMMAND, "--nproc", str(nproc), script], **PIPES) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=AT_ONCE)
    return process.returncode, errors


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(0.01); dist.barrier()",
        pytest.param("time.sleep(0.01)", marks=pytest.mark.slow),
        pytest.param("torch.ones(99).sum()", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_all_ranks(tmp_path, wait):
    text = f"start()\nprint('ready', flush=True)\nwhile True: {wait}\n"
    assert interrupted(tmp_path, text, nproc=3) == (130, "interrupted\n")


STUBBORN = """
time.sleep(0.3)  # until the main thread waits for the ranks
print("ready", flush=True)
while True:
    try:
        while True:  # an exception between two turns ends this loop only
            try: WAIT
            except BaseException: pass
    except BaseException: pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["time.sleep(600)", "torch.zeros(1 << 20).exp_()"])
def test_a_rank_that_cannot_be_stopped_ends_with_the_process(tmp_path, wait):
    text = "pycollect.threads: rank 0 did not stop, and was left\ninterrupted\n"
    assert interrupted(tmp_path, STUBBORN.replace("WAIT", wait), nproc=1) == (130, text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --nproc, script.py"),
        (["--nproc", "0", "x.py"], "argument --nproc: '0' is no number of ranks; pass 1 or more"),
        (["--nproc", "gpu", "x.py"], "argument --nproc: 'gpu' is no number of ranks"),
        (["--nproc=2", "--timeout", "nan", "x.py"], "argument --timeout: 'nan' is no time"),
        (["--nproc=2", "--timeout", "0", "x.py"], "argument --timeout: '0' is no time"),
        (["--nproc=2", "--device", "tpu", "x.py"], "error: device is 'tpu'; torch has no such"),
        (["--nproc=2", "missing.py"], "missing.py cannot be read (No such file or directory)"),
        (["--nproc=2", "."], ". cannot be read (Is a directory)"),
        (["--nproc=2", "-m", "missing"], "there is no module named missing"),
        (["--nproc=2", "-m", "torch.missing.x"], "there is no module named torch.missing.x"),
        (["--nproc=2", "-m", "multiprocessing"], "is a package without a module __main__"),
    ],
)
def test_bad_options_are_named_in_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: python -m pycollect.threads --nproc N ")
    assert message in error
