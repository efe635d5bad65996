"""``lowtide bench synthetic`` and ``lowtide bench family``: cells of a benchmark, each in a process of its own."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowtide.bench.describe import mode_title
from lowtide.cli.bench_common import (
    Attention,
    Compile,
    Largest,
    Precision,
    Rank,
    Size,
    Steps,
    VramBudget,
    WarmUp,
    budgets_of,
    checked,
    device_for,
    libraries,
    most_parameters,
)
from lowtide.cli.options import Sizes, sizes_of
from lowtide.cli.output import say, show, working
from lowtide.errors import ConfigError
from lowtide.keys import AUTO
from lowtide.signals import handled
from lowtide.units import counted, format_bytes

if TYPE_CHECKING:
    from lowtide.bench.record import Condition, Record
    from lowtide.bench.sweep import Progress as Told

_INTERRUPTED = 130

Works = Annotated[
    list[str] | None,
    typer.Option("--work", metavar="BLOCKSxTOKENS", help="Default: the public four, or one of size tiny."),
]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Families (`lowtide families` lists them), or all.")]
Modes = Annotated[str, typer.Option(metavar="LIST", help="Modes, separated by commas, or all. docs/bench.md.")]
Adapters = Annotated[str, typer.Option(metavar="LIST", help="What is trained: frozen, lora, full, by commas.")]
Adapter = Annotated[str, typer.Option(metavar="NAME", help="What is trained: lora or full.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Results are appended there; what is finished is skipped.")]
Again = Annotated[bool, typer.Option("--again", help="Run finished cells once more.")]


def synthetic(
    out: Out,
    work: Works = None,
    modes: Modes = "all",
    vram_budget: VramBudget = None,
    adapter: Adapters = "frozen,lora,full",
    rank: Rank = 16,
    compile: Compile = "off",
    attention: Attention = "flash",
    size: Size = "real",
    warm_up: WarmUp = 5,
    steps: Steps = 10,
    again: Again = False,
) -> None:
    """Measure synthetic transformer blocks (width 3072, 24 heads), as public tables of offload have them."""
    with working():
        sweep = _bench()
        common = {"compile": compile, "attention": attention, "size": size, "rank": rank}
        chosen = {"modes": mode_names(modes, vram_budget is not None), "budgets": budgets_of(vram_budget)}
        works = work or (sweep.SYNTHETIC if size == "real" else sweep.SYNTHETIC[:1])  # tiny ones are all the same
        cells = sweep.synthetic_conditions(works, adapters=_listed(adapter), **chosen, **common)
        made = _swept(cells, out / "synthetic.jsonl", warm_up, steps, again)
    show(*_ending(made, out))


def family(
    names: Names,
    out: Out,
    modes: Modes = "all",
    vram_budget: VramBudget = None,
    adapter: Adapter = "lora",
    rank: Rank = 16,
    precision: Precision = "bf16",
    compile: Compile = "off",
    attention: Attention = "default",
    sizes: Sizes = None,
    largest: Largest = "10e9",
    size: Size = "real",
    warm_up: WarmUp = 5,
    steps: Steps = 10,
    again: Again = False,
) -> None:
    """Measure families in their real configuration with random weights: seconds a step and peak memory by mode."""
    with working():
        sweep = _bench()
        common = {"precision": precision, "compile": compile, "attention": attention, "size": size}
        chosen = {"modes": mode_names(modes, vram_budget is not None), "budgets": budgets_of(vram_budget)}
        cells = sweep.family_conditions(
            _families(names), sizes=sizes_of(sizes or ()), most_parameters=most_parameters(largest),
            adapter=adapter, rank=rank if adapter == "lora" else None, **chosen, **common,
        )  # fmt: skip
        made = _swept(cells, out / "family.jsonl", warm_up, steps, again)
    show(*_ending(made, out))


def mode_names(text: str, budgeted: bool) -> list[str]:
    """``all``: ``auto`` among them where a budget is given.

    Raises ConfigError for an unknown mode, and for a budget that none of them takes.
    """
    from lowtide.bench.modes import MODES, mode

    if text.strip() == "all":
        return [name for name in MODES if budgeted or name != AUTO]
    names = [mode(name).name for name in _listed(text)]
    if budgeted and AUTO not in names:
        raise ConfigError(f"--vram-budget is for mode {AUTO}, and --modes {text} is without it")
    return names


def _bench() -> Any:
    """The part that needs the benchmark's libraries. Raises ConfigError where one is not installed."""
    with libraries():
        from lowtide.bench import isolate, sweep  # noqa: F401 - to fail here, with one message
    return sweep


def _swept(cells: "Iterable[Condition]", out: Path, warm_up: int, steps: int, again: bool) -> "list[Record]":
    from lowtide.bench.cell import Effort, run_apart
    from lowtide.bench.isolate import isolated
    from lowtide.bench.provenance import machine
    from lowtide.bench.sweep import sweep

    wanted = [checked(cell) for cell in cells]
    device = device_for(wanted)
    facts = isolated(
        machine, device, device=device
    )  # this process must not touch the accelerator: cells need all of it
    effort = Effort(warm_up, steps)
    # ``kill``, or a scheduler's end of time, is as Ctrl-C: the cell that runs ends with this process
    with _told() as tell, handled(signal.default_int_handler, signal.SIGTERM):
        try:
            return sweep(wanted, lambda cell: run_apart(cell, effort, device, facts), out, facts["card"], tell, again)
        except KeyboardInterrupt:
            say("Stopped. What was measured is written; run the same command again: it goes on from there.")
            raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def _told() -> "Iterator[Callable[[Told], None]]":
    """A bar with the time that is left on a terminal; a line for each cell everywhere."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("cells", total=None)

        def tell(told: "Told") -> None:
            name = f"{told.condition.work} {mode_title(told.condition)}"
            bar.update(task, total=told.total, completed=told.number + (told.record is not None), description=name)
            if told.record is not None:
                line = f"{told.number + 1}/{told.total} {_title(told.condition)}: {_outcome(told.record)}"
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield tell


def _title(condition: "Condition") -> str:
    extra = [condition.adapter, condition.precision, f"compile {condition.compile}" * (condition.compile != "off")]
    return ", ".join(filter(None, [condition.work, mode_title(condition), *extra]))


def _outcome(record: "Record") -> str:
    figures = record.figures
    if figures is None:
        return f"{record.state}: {record.reason}"
    inert = f"  INERT: {'; '.join(record.inert)}" if record.inert else ""
    return f"{figures.step_s:.4f} s, {format_bytes(figures.peak_allocated_bytes)}{inert}"


def _ending(made: "list[Record]", out: Path) -> Iterator[str]:
    if not made:
        yield f"Every cell was measured before; --again runs them once more. `lowtide bench report {out}` shows them."
        return
    results = sum(record.state == "ok" for record in made)
    yield f"{counted(len(made), 'cell')} run, {results} with figures. `lowtide bench report {out}` shows all."


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _families(names: list[str]) -> list[str]:
    from lowtide import families

    if [name.lower() for name in names] == ["all"]:
        return [row.key for row in families.all_families()]
    return names
