"""``lowtide bench report`` and ``lowtide bench compare``: what lies in benchmark records, for people."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.bench_common import INSTALL
from lowtide.cli.options import AsJson
from lowtide.cli.output import show, show_json, working
from lowtide.errors import ConfigError
from lowtide.units import counted

if TYPE_CHECKING:
    from lowtide.bench.compare import Change, Comparison
    from lowtide.bench.record import Record
    from lowtide.bench.report import Report

_RECORDS_HELP = "A file of benchmark records (JSON lines), or a folder of *.jsonl files."

Records = Annotated[Path, typer.Argument(metavar="DIR", help=_RECORDS_HELP)]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to write. Default: the folder `report` beside the records.")
]
Before = Annotated[Path, typer.Argument(metavar="A", help=f"Before. {_RECORDS_HELP}")]
After = Annotated[Path, typer.Argument(metavar="B", help="After: as A.")]


def report(records: Records, out: Out = None) -> None:
    """Write a report over benchmark records: Markdown, one HTML page that needs nothing else, and frontier plots."""
    with working():
        found = _read(records)
        try:
            from lowtide.bench.files import write_report
        except ModuleNotFoundError as error:
            raise ConfigError(f"a report needs {error.name}, which is not installed. Install: {INSTALL}") from error
        from lowtide.bench.report import build_report

        result = build_report(found)
        folder = records if records.is_dir() else records.parent
        written = write_report(result, out or folder / "report")
    show(*_summary(result), *_paths(written))


def compare(a: Before, b: After, json: AsJson = False) -> None:
    """Compare two sets of benchmark records, A before and B after. Exit code 1 if something got worse beyond noise,
    2 if A and B share no cell, so that nothing was compared."""
    with working():
        from lowtide.bench.compare import compare as compared

        comparison = compared(_read(a), _read(b))
    if json:
        show_json(comparison.as_dict())
    elif comparison.compared:
        show(*_in_words(comparison))
    if not comparison.compared:
        why = f" ({'; '.join(comparison.apart)})" if comparison.apart else ""
        raise ConfigError(f"nothing was compared: {a} and {b} share no cell{why}")
    if comparison.regressions:
        raise typer.Exit(1)


def _read(path: Path) -> "list[Record]":
    """The records, at least one. Raises ConfigError where there are none."""
    from lowtide.bench.record import read

    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a folder of benchmark records (*.jsonl), or one such file")
    records = list(read(path))
    if not records:
        raise ConfigError(f"{path} holds no benchmark records (*.jsonl); `lowtide bench synthetic` makes some")
    return records


def _summary(report: "Report") -> Iterator[RenderableType]:
    states = Counter(cell.state for cell in report.cells)
    counts = ", ".join(
        counted(count, "result") if state == "ok" else f"{count} {state}" for state, count in states.items()
    )
    yield f"{counted(len(report.matrices), 'work')}, {counted(len(report.cells), 'cell')}: {counts}."
    if on_cpu := sum(matrix.on_cpu for matrix in report.matrices):
        yield f"Measured on a CPU, where offload is simulated, and in no plot: {on_cpu} of them."
    for matrix in report.matrices:
        for column in matrix.columns:
            for cell in column.cells:
                for what in cell.outcome.disagreements() if cell.outcome else ():
                    where = f"{matrix.title}, {column.title}, {cell.mode}"
                    yield Text(f"runs disagree: {where}: {what}", style="yellow")


def _paths(written: list[Path]) -> Iterator[Text]:
    """The pages, and the folder of the plots where there are any."""
    pages = [path for path in written if path.suffix != ".svg"]
    plots = [path for path in written if path.suffix == ".svg"]
    yield from map(_path, pages)
    if plots:
        yield Text(f"{counted(len(plots), 'plot')} in {plots[0].parent}", no_wrap=True, overflow="ignore")


def _path(path: Path) -> Text:
    """A line that a terminal wraps but rich does not, so that it can be copied."""
    return Text(str(path), no_wrap=True, overflow="ignore")


def _in_words(comparison: "Comparison") -> Iterator[RenderableType]:
    from lowtide.bench.compare import KINDS, NOISE

    for kind, meaning in KINDS.items():
        changes = comparison.of(kind)
        if changes:
            yield Text(f"{kind} ({meaning}): {len(changes)}", style="red" if kind == "regression" else "bold")
            yield from map(_line, changes)
    yield f"{counted(comparison.compared, 'cell')} compared; the same within noise: {comparison.unchanged}."
    yield NOISE


def _line(change: "Change") -> Text:
    what = "" if change.what == "state" else f"{change.what} "
    return Text(f"  {change.work}, {change.mode} ({change.condition}): {what}{change.before} → {change.after}")
