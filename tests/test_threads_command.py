"""Scripts that are written for torchrun have, as threads, what they have as processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dist_process import own_process
from threads_command import TIMEOUT, assert_printed, ran, ran_text, written

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
