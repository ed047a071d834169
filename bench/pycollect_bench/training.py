"""Training steps of replicas in this process and of DDP processes, in turns, and their picture.

A step is complete: split, forward, backward, reduction and update, until the devices are done. The
time of its reduction is the time in which the step waits for it. DDP overlaps the reduction, so its
reduction is timed separately, with the same buckets.

Two ranks of the ResNet-18 take two thirds of one replica's time if malloc maps tensors over 32 MB
anew at every step, as glibc does: tensors of the whole batch exceed this, tensors of half a batch
do not. With large MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ two ranks take as long as one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect._timing import Effort, Sampler, host_time, interleave
from pycollect.train.data.dataset import Examples
from pycollect.train.data.folder import scan
from pycollect.train.graph import GraphedStep
from pycollect.train.loader import Loader, LoaderOptions
from pycollect.train.losses import summed_cross_entropy
from pycollect.train.models import MODELS, LeNet
from pycollect.train.optimizers import sgd_factory
from pycollect.train.reduce import GRADIENT_REDUCTIONS
from pycollect.train.replica_trainer import ReplicaTrainer
from pycollect.train.settings import StepOptions

from .bar_plot import BASELINE, GAP, finish
from .clocks import synchronizer
from .ranks import Rank, Ranks
from .report import devices_named
from .runner import OURS, PEER, Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONE = "one replica, whole batch"
NAIVE, PYCOLLECT, OVERLAPPED = "naive loop", "pycollect", "pycollect, overlapped"
GRAPH, COMPILED = "pycollect, graph", "pycollect, compiled"
WHOLE = "naive loop, whole step"  # by the clock of the graph
DDP_GLOO, DDP_OURS = "DDP, gloo", "DDP, pycollect"
BACKENDS = MappingProxyType({DDP_GLOO: "gloo", DDP_OURS: "pycollect"})
PEERS = (ONE, NAIVE, WHOLE, DDP_GLOO)
# What a result is about: a step, or a step with the loading of its batch.
STEP, LOADING = "step", "loading"
# Learning rate: so small that all numbers stay finite after any number of steps on one batch.
_LR = 1e-4
# Number of steps after which parameters are compared, and their learning rate, large for all bits.
_CHECKED, _CHECKED_LR = 3, 0.1
# Elements of DDP's default buckets, 25 MB; the separately timed reduction uses the same buckets.
_BUCKET_ELEMENTS = (25 << 20) // 4
# Timeout in seconds for the answers of DDP's ranks: a step takes seconds at most.
_ANSWER_SECONDS = 300.0
# Batches in an epoch with loading, of which the first cannot be prepared ahead, and the number of
# batches prepared ahead: the next one, and one in preparation.
_BATCHES, _AHEAD = 4, 2
# Width and height of the image files: those of small photographs, scaled to 28 x 28 for LeNet.
_PHOTOGRAPH = (160, 120)
# Colours that the colour-blind can distinguish (Okabe and Ito).
_COMPUTE, _REDUCTION = "#56b4e9", "#d55e00"


@dataclass(frozen=True)
class TrainingCase:
    """A model, the ranks' devices, and the number of examples in a batch over all ranks."""

    model: str
    batch: int
    devices: tuple[torch.device, ...]
    size: int = 28  # height and width of the images

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def one_gpu(self) -> bool:
        """Whether all ranks share a GPU."""
        return len(set(self.devices)) == 1 and self.devices[0].type == "cuda"

    @property
    def about(self) -> dict[str, Any]:
        """The case for the record."""
        found = {"model": self.model, "batch": self.batch, "world": self.world, "size": self.size}
        return {"what": STEP, **found, "devices": devices_named(self.devices)}

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return a batch on the CPU, equal in all runs; its values do not affect the times."""
        generator = torch.Generator().manual_seed(0)
        X = torch.rand((self.batch, 1, self.size, self.size), generator=generator)
        return X, torch.randint(10, (self.batch,), generator=generator)


class Steps:
    """A candidate of this process: its replicas, and their step on one batch.

    `options` are StepOptions, without overlap unless they have it. The step's own clock waits for
    the devices at every part; a graph has none, and `whole` steps are timed without it.
    """

    def __init__(
        self,
        case: TrainingCase,
        devices: Sequence[torch.device],
        reduction: str = "pycollect",
        *,
        lr: float = _LR,
        graphed: bool = False,
        whole: bool = False,
        **options: bool,
    ) -> None:
        self._replicas = ReplicaTrainer(
            MODELS[case.model](),
            devices,
            optimizer=sgd_factory(lr),
            reduction=GRADIENT_REDUCTIONS[reduction],
            options=StepOptions(
                **{"overlap": False, "exact_times": not (graphed or whole), **options}
            ),
        )
        X, y = case.examples()
        step = GraphedStep.of(X, y, self._replicas) if graphed else self._replicas.step
        self._step, self._whole = partial(step, X, y), graphed or whole
        for _ in range(2 * options.get("compile", False)):
            self._step()  # the second step compiles

    def sampler(self, reductions: list[float]) -> Sampler:
        """Return a sampler of steps, which appends the seconds of reductions to `reductions`."""
        if self._whole:
            return host_time(self._step, synchronize=synchronizer(self._replicas.devices))

        # The step's own clock is read: it has the reduction's part of the same step.
        def sample(calls: int) -> list[float]:
            seconds = []
            for _ in range(calls):
                self._step()
                seconds.append(self._replicas.seconds.total)
                reductions.append(self._replicas.seconds.reduction)
            return seconds

        return sample

    def trained(self) -> list[Tensor]:
        """Return the bits of all ranks' parameters after some steps."""
        for _ in range(_CHECKED):
            self._step()
        return [p.detach().view(torch.int32).cpu() for ps in self._replicas.parameters for p in ps]


def _in_process(case: TrainingCase, compiled: bool = False) -> dict[str, Callable[..., Steps]]:
    """Return how to make each candidate of this process.

    With one rank there is no reduction, and most would equal ONE.
    """
    make = partial(Steps, case, case.devices)
    found: dict[str, Callable[..., Steps]] = {ONE: partial(Steps, case, case.devices[:1])}
    if case.world > 1:
        found |= {NAIVE: partial(make, "naive"), PYCOLLECT: make}
        found[OVERLAPPED] = partial(make, overlap=True)
        if case.model == "lenet" and case.one_gpu:
            found[WHOLE] = partial(make, "naive", whole=True)
            found[GRAPH] = partial(make, graphed=True)
    if compiled:
        found[COMPILED] = partial(make, compile=True)
    return found


def wrong_parameters(case: TrainingCase) -> dict[str, int]:
    """Return, by candidate, the number of parameters whose bits differ from the naive loop's.

    The convolutions are cuDNN's deterministic ones; the bits of others differ from run to run.
    """
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        ways = _in_process(case).items()
        bits = {name: make(lr=_CHECKED_LR).trained() for name, make in ways if name != ONE}
    naive = bits.pop(NAIVE, [])
    return {
        name: sum(not torch.equal(a, b) for a, b in zip(naive, ours, strict=True))
        for name, ours in bits.items()
    }


def _ddp_step(case: TrainingCase, rank: int) -> Callable[[], None]:
    """Return the step of one rank of DDP."""
    device = case.devices[rank]
    X, y = (part.tensor_split(case.world)[rank].to(device) for part in case.examples())
    module = nn.parallel.DistributedDataParallel(MODELS[case.model]().to(device))
    sgd = torch.optim.SGD(module.parameters(), lr=_LR, fused=True)
    # DDP averages the gradients over the ranks. This scale makes them those of the batch mean.
    scale = case.world / case.batch

    def step() -> None:
        sgd.zero_grad(set_to_none=True)
        loss = summed_cross_entropy(module(X), y) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()

    return step


def ddp_rank(rank: Rank, task: tuple[TrainingCase, str]) -> None:
    """Answer numbers of calls with the seconds of as many steps, and of as many reductions of a
    step's bytes without other work. Several ranks may share a GPU.
    """
    case, backend = task
    device = case.devices[rank.number]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group(backend)
    numel = sum(param.numel() for param in MODELS[case.model]().parameters())
    buckets = torch.split(torch.zeros(numel, device=device), _BUCKET_ELEMENTS)

    def reduce() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    timer = partial(host_time, synchronize=synchronizer([device]))
    step, reduction = timer(_ddp_step(case, rank.number)), timer(reduce, barrier=dist.barrier)
    for calls in rank.requests():
        rank.send((step(calls), reduction(calls)))


def _ddp_sampler(ranks: Ranks, reductions: list[float]) -> Sampler:
    """Return a sampler of the slowest rank's steps; it appends its reductions to `reductions`."""

    def sample(calls: int) -> list[float]:
        steps, reduced = zip(*ranks.ask(calls, _ANSWER_SECONDS), strict=True)
        reductions.extend(map(max, zip(*reduced, strict=True)))
        return list(map(max, zip(*steps, strict=True)))

    return sample


def _rows(case: TrainingCase, effort: Effort, *, ddp: bool, compiled: bool) -> list[Row]:
    """Time a step of all candidates in turns."""
    reductions: dict[str, list[float]] = {}
    samplers: dict[str, Sampler] = {}
    with ExitStack() as stack:
        for name, make in _in_process(case, compiled).items():
            samplers[name] = make().sampler(reductions.setdefault(name, []))
        for name, backend in BACKENDS.items() if ddp else ():
            program = f"{__name__}:{ddp_rank.__name__}"
            ranks = stack.enter_context(Ranks(case.world, program, (case, backend)))
            samplers[name] = _ddp_sampler(ranks, reductions.setdefault(name, []))
        timings = interleave(samplers, effort)
    peers = {name: timings[name] for name in PEERS if name in timings}
    rows = []
    for name, timing in timings.items():
        taken = reductions[name][-timing.count :]
        numbers = {"reduction": statistics.median(taken)} if taken else {}
        kind = PEER if name in PEERS else OURS
        rows.append(Row(name, timing, kind, numbers=numbers).compared(peers))
    return rows


def measure(case: TrainingCase, effort: Effort, ddp: bool = True, compiled: bool = False) -> Result:
    """Time a step of all candidates in turns, and compare the bits of those of this process.

    With `ddp` there is a process per rank and backend. If one fails, the candidates of this process
    are measured without them. `compiled` adds the step as one graph of torch.compile, which rounds
    its own operations differently, so its bits are not compared.
    """
    rows: list[Row] = []
    failed, why = False, ""
    if ddp and len({device.type for device in case.devices}) > 1:
        why = "needs all ranks on CPUs or all on GPUs"
    elif ddp:
        try:
            rows = _rows(case, effort, ddp=True, compiled=compiled)
        except RuntimeError as error:
            failed, why = True, str(error).strip().splitlines()[-1]
    rows = rows or _rows(case, effort, ddp=False, compiled=compiled)
    wrong = wrong_parameters(case)
    rows = [replace(row, wrong=wrong.get(row.name)) for row in rows]
    return Result(case.about, rows, dict.fromkeys(BACKENDS, why) if why else {}, failed)


def share(row: Row) -> float | None:
    """Return the percentage of a step that is its reduction; a graph has none by itself."""
    reduction = row.numbers.get("reduction")
    return None if reduction is None else 100 * reduction / row.seconds


@contextmanager
def _files(examples: int) -> Iterator[Examples]:
    """Yield a data set of image files that exist during the context."""
    from PIL import Image

    width, height = _PHOTOGRAPH
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder, "all", "one class")
        parent.mkdir(parents=True)
        for i in range(examples):
            coarse = torch.randint(256, (height // 8, width // 8, 3), dtype=torch.uint8)
            small = Image.fromarray(coarse.numpy())
            small.resize(_PHOTOGRAPH).save(parent / f"{i}.jpg")
        yield scan(parent.parent, (parent.name,), 28)


def _epochs(
    examples: Examples, loading: LoaderOptions, devices: Sequence[torch.device], waits: list[float]
) -> Sampler:
    """Return a sampler of epochs, by step, which appends the mean seconds of waiting to `waits`."""
    options = StepOptions(exact_times=True)
    module = LeNet(in_channels=3)
    replicas = ReplicaTrainer(module, devices, optimizer=sgd_factory(_LR), options=options)
    loader = Loader(examples, loading, devices=devices)

    def epoch() -> None:
        waited = []
        for batch in loader.epoch():
            waited.append(batch.waited)
            replicas.step(batch.X, batch.y)
        waits.append(statistics.mean(waited))

    return host_time(epoch, calls_in_run=_BATCHES)


def measure_loading(devices: Sequence[torch.device], batch: int, effort: Effort) -> Result:
    """Time a step of LeNet with the loading of its batch, with and without batches ahead, in turns.

    Examples are in memory, and in image files.
    """
    pillow = find_spec("PIL") is not None
    waits: dict[str, list[float]] = {}
    samplers: dict[str, Sampler] = {}
    n = batch * _BATCHES
    memory: Examples = (torch.rand(n, 3, 28, 28), torch.randint(10, (n,)))
    sources = {"examples in memory": memory}
    with ExitStack() as stack:
        if pillow:
            sources["image files"] = stack.enter_context(_files(n))
        for source, examples in sources.items():
            for prefetch in (0, _AHEAD):
                name = f"{source}, {prefetch or 'none'} ahead"
                loading = LoaderOptions(batch, prefetch=prefetch)
                samplers[name] = _epochs(examples, loading, devices, waits.setdefault(name, []))
        timings = interleave(samplers, effort)
    rows = [
        Row(name, timing, numbers={"waited": statistics.median(waits[name][-timing.count :])})
        for name, timing in timings.items()
    ]
    about = TrainingCase("lenet", batch, tuple(devices)).about | {"what": LOADING}
    return Result(about, rows, {} if pillow else {"image files": "Pillow is not installed"})


def _panel(axes: Axes, cases: Sequence[dict[str, Any]]) -> None:
    """Draw the bars of one model: computation, and the reduction on top."""
    labels: list[str] = []
    bars: list[tuple[float, float, float]] = []
    for case in cases:
        ranks = "1 rank" if case["world"] == 1 else f"{case['world']} ranks"
        for row in case["rows"]:
            labels.append(ONE if row["name"] == ONE else f"{ranks}: {row['name']}")
            step = row["time"]["p50"]
            part = min(row.get("reduction", 0.0), step)
            bars.append((step * 1e3, part * 1e3, 1 / row["speedup"][ONE]))
    places = range(len(labels))
    steps = [step for step, _, _ in bars]
    computed = [step - part for step, part, _ in bars]
    colours = [BASELINE if label == ONE else _COMPUTE for label in labels]
    axes.barh(places, computed, color=colours)
    axes.barh(places, [part for _, part, _ in bars], left=computed, color=_REDUCTION)
    for place, (step, part, slowdown) in zip(places, bars, strict=True):
        text = f"{slowdown:.2f}x" + (f", reduction {100 * part / step:.2g} %" if part else "")
        axes.text(step + GAP * max(steps), place, text, va="center", fontsize=8)
    axes.set_yticks(places, labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(steps))
    axes.set_xlabel("median step (ms); x: of one replica in the same rounds")
    axes.set_title(f"{cases[0]['model']}, batch {cases[0]['batch']}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(record: dict[str, Any], path: str) -> None:
    """Write bars of a run's steps to `path` (PNG, SVG or PDF by its suffix), a panel per model.

    Raises ImportError without matplotlib, and ValueError if there is no step to plot.
    """
    from matplotlib.figure import Figure

    by_model: dict[str, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        if case["what"] == STEP:
            by_model.setdefault(case["model"], []).append(case)
    if not by_model:
        raise ValueError("nothing to plot: no step was measured")
    bars = max(sum(len(case["rows"]) for case in group) for group in by_model.values())
    figure = Figure(figsize=(7.0 * len(by_model), 1.6 + 0.34 * bars), layout="constrained")
    panels = figure.subplots(1, len(by_model), squeeze=False)[0]
    for axes, group in zip(panels, by_model.values(), strict=True):
        _panel(axes, group)
    colours = {ONE: BASELINE, "forward, backward, update": _COMPUTE, "reduction": _REDUCTION}
    about = record["environment"]
    finish(figure, colours, f"{about['machine']}, torch {about['torch']}", path)
