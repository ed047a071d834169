"""Run several ways of reducing on the same batches and say what the difference is.

Those of one process take turns at every step. Times are medians: of all steps for the reduction, of
all epochs for the epoch, and a ratio above 1 means faster than the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycollect.devices import DeviceSpec

from .config import Config
from .contestant import Contestant
from .curves import Curve, plot
from .entrant import Entrant
from .history import divergence
from .job import Job, prepare
from .log import Log
from .processes import check_available, run_spawned
from .reduce import REDUCTIONS
from .report import Report
from .trainer import enter, fit
from .trial import unused_parameters

PAIR = ("naive", "pycollect")  # the baseline first
NAMES = (*PAIR, "ddp")
DDP_BACKEND = "gloo"  # what people have


@dataclass(frozen=True)
class Comparison:
    """Entrants that have trained on the same batches, the baseline first."""

    entrants: Sequence[Entrant]

    @property
    def identical(self) -> bool:
        """Whether every parameter of every rank has the same bits in all of them."""
        first = self.entrants[0]
        return all(entrant.difference(first) == 0 for entrant in self.entrants[1:])

    def __str__(self) -> str:
        last = self.entrants[-1]
        steps, epochs = len(last.steps), len(last.epochs)
        if len(self.entrants) > 2:
            return f"{self._table()}\n{self._verdicts(steps)}"
        return "\n".join(
            (
                self._ratio(f"reduction time, median of {steps} steps", _reduction),
                self._ratio(f"epoch time, median of {epochs} epochs", _epoch),
                self._verdicts(steps),
            )
        )

    def _ratio(self, what: str, seconds: Callable[[Entrant], float]) -> str:
        first, second = (seconds(entrant) for entrant in self.entrants)
        names = [entrant.name for entrant in self.entrants]
        return (
            f"{what}: {names[0]} {1e3 * first:.3f} ms, {names[1]} {1e3 * second:.3f} ms, "
            f"ratio {first / second:.2f}"
        )

    def _table(self) -> str:
        """A line for each, with the ratios to the first."""
        first = self.entrants[0]
        columns = (("reduction", _reduction), ("step", _step), ("epoch", _epoch))
        head = "".join(f"{f'{name} (ms)':>16}{'ratio':>7}" for name, _ in columns)
        lines = [f"{'median of':<10}{head}{'test acc':>10}"]
        for entrant in self.entrants:
            cells = "".join(
                f"{1e3 * seconds(entrant):>16.3f}{seconds(first) / seconds(entrant):>7.2f}"
                for _, seconds in columns
            )
            lines.append(f"{entrant.name:<10}{cells}{entrant.epochs[-1].accuracy:>10.2f}")
        return "\n".join(lines)

    def _verdicts(self, steps: int) -> str:
        first, others = self.entrants[0], self.entrants[1:]
        if self.identical:
            return f"parameters after {steps} steps: the same bits"
        found = ", ".join(
            f"{e.name} {'the same bits' if d == 0 else f'DIFFERENT BITS, by up to {d:.1e}'}"
            for e in others
            for d in [e.difference(first)]
        )
        return f"parameters after {steps} steps, against {first.name}: {found}"


def _reduction(entrant: Entrant) -> float:
    return entrant.reduce_seconds


def _step(entrant: Entrant) -> float:
    return entrant.step_seconds


def _epoch(entrant: Entrant) -> float:
    return entrant.epoch_seconds


def parse_names(text: str) -> tuple[str, ...]:
    """Read the names to compare, the baseline first; ValueError unless two or more are known.

    >>> parse_names("naive,ddp")
    ('naive', 'ddp')
    """
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown or len(set(names)) != len(names) or len(names) < 2:
        raise ValueError(f"--compare takes two or more of {','.join(NAMES)}, not {text!r}")
    return names


def compare(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    names: Sequence[str] = PAIR,
    ddp_backend: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> Comparison:
    """Train once for every name on the same batches; see `train` for the rest.

    "ddp" is DistributedDataParallel over `ddp_backend`, gloo by default, in processes that are
    started here: a script that calls it needs the usual `if __name__ == "__main__":`.

    >>> comparison = compare("cpu*2", data="digits", epochs=1, quiet=True)
    >>> comparison.identical
    True
    """
    names = parse_names(",".join(names))
    check_options(options)
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    job, notice = prepare(Config.of(asked))
    report = Report(quiet)
    if notice:
        report.line(notice)
    return run(job, names, report, ddp_backend)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for what a comparison goes without, before anybody looks at its value.

    >>> check_options({"log": "no such folder/run.jsonl"})
    Traceback (most recent call last):
    ValueError: a comparison goes without log
    """
    unfit = [name for name in ("checkpoint", "resume", "log") if options.get(name) is not None]
    unfit += ["graph"] * bool(options.get("graph"))
    if options.get("weights") == "auto" or options.get("replay_shares") is not None:
        unfit.append("measured shares")
    if unfit:
        raise ValueError(f"a comparison goes without {unfit[0]}")


def check(job: Job, names: Sequence[str], backend: str | None) -> None:
    """Raise ValueError for a job that cannot be compared with ddp, or a backend without ddp."""
    if "ddp" in names:
        check_available(backend or DDP_BACKEND)
        _check_all_used(job)
    elif backend is not None:
        raise ValueError(f"{backend} is for ddp, which is not among {', '.join(names)}")


def _check_all_used(job: Job) -> None:
    """Refuse what DistributedDataParallel refuses in the second step."""
    unused = unused_parameters(job.module, job.data.image_shape)
    if unused:
        raise ValueError(
            f"{', '.join(unused)} take no part in what the model gives, and ddp waits for the "
            "gradients of all parameters: freeze them with requires_grad_(False)"
        )


def run(job: Job, names: Sequence[str], report: Report, backend: str | None = None) -> Comparison:
    """Train once for every name; print a line per epoch and contestant, and the comparison.

    Raises ValueError as `check`.
    """
    check(job, names, backend)
    report.line(f"{job.title} on {job.data}: {job.settings}, {' against '.join(names)}")
    entrants = {e.name: e for e in _in_turns(job, [n for n in names if n in REDUCTIONS], report)}
    if "ddp" in names:
        entrants["ddp"] = run_spawned(job, backend or DDP_BACKEND, report)
    comparison = Comparison([entrants[name] for name in names])
    report.line(comparison)
    for entrant in comparison.entrants:
        if lost := divergence(entrant.steps, entrant.replicas[0]):
            report.warning(f"{entrant.name}: {lost}")
    if job.config.plot is not None:
        curves = [Curve(e.name, e.epochs, e.steps) for e in comparison.entrants]
        plot(curves, job.config.plot, f"{job.title} on {job.data}: {job.settings}")
    return comparison


def _in_turns(job: Job, names: Sequence[str], report: Report) -> list[Entrant]:
    """Run those of one process, a step of each in turn."""
    if not names:
        return []
    with Log(None) as log, job.repeatable():
        contestants = [enter(job, name, log, compared=True) for name in names]
        for _ in fit(job, contestants, report):
            for contestant in contestants:
                report.line(f"{contestant.epochs[-1]} ({contestant.name})")
    return [_entrant(contestant) for contestant in contestants]


def _entrant(contestant: Contestant) -> Entrant:
    modules = contestant.trainee.modules
    replicas = [list(module.parameters()) for module in modules]
    return Entrant(contestant.name, contestant.epochs, contestant.steps, replicas)
