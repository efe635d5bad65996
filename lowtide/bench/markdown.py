"""A report as Markdown, for a repository: the figures of ``plot`` lie beside it as files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lowtide.bench.details import details
from lowtide.bench.report import LEGEND, Cell, Matrix, Report

_DETAIL_HEADS = (
    "condition",
    "mode",
    "runs",
    "spread s",
    "reserved GiB",
    "host GiB",
    "first step s",
    "blocks",
    "notes",
)


def markdown(report: Report, images: Mapping[str, str] | None = None) -> str:
    """images: title → path of a plot, as the page should name it."""
    lines = ["# Benchmark report", "", LEGEND, "", *_machines(report)]
    lines += [f"Public figures: {source}." for source in report.sources]
    for title, path in (images or {}).items():
        lines += ["", f"![{_text(title)}]({path})"]
    for matrix in report.matrices:
        lines += ["", *_matrix(matrix)]
    return "\n".join(lines) + "\n"


def _machines(report: Report) -> Iterator[str]:
    for machine in report.machines:
        facts = ", ".join(f"{name} {text}" for name, text in machine.facts.items())
        yield f"- **{machine.card}**, {machine.records} records: {_text(facts)}"
    yield ""


def _matrix(matrix: Matrix) -> Iterator[str]:
    yield f"## {_text(matrix.title)}"
    yield ""
    if matrix.truncated:
        yield "**Truncated model:** its figures are not those of the whole one.\n"
    yield f"{_text(matrix.common)}." if matrix.common else ""
    for remark in matrix.published.remarks if matrix.published else ():
        yield f"Public figures: {remark}."
    yield ""
    heads = [_head(column.title, column.differs) for column in matrix.columns]
    yield from _table(["mode", *heads], ([mode, *map(_cell, cells)] for mode, cells in matrix.rows))
    yield ""
    yield "<details><summary>Behind the cells</summary>\n"
    yield from _table(
        _DETAIL_HEADS,
        (
            [_text(text) for text in (entry.column, entry.mode, entry.runs, entry.spread, entry.reserved, entry.host)]
            + [entry.first_step, _text(entry.blocks), "<br>".join(map(_text, entry.notes))]
            for entry in details(matrix)
        ),
    )
    yield "\n</details>"


def _head(title: str, differs: Sequence[str]) -> str:
    return _text(title) + (f"<br>*public: {_text(', '.join(differs))}*" if differs else "")


def _cell(cell: Cell) -> str:
    headline = f"**{_text(cell.headline)}**" if cell.result else _text(cell.headline)
    remarks = [f"⚠ {_text(remark)}" for remark in cell.remarks]
    return "<br>".join(filter(None, (headline, cell.ratios, *remarks, f"*{cell.reference}*")))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(heads)
    yield _row(["---"] * len(heads))
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Text that cannot end its cell, nor become a tag or an emphasis."""
    for char, instead in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("\n", " ")):
        text = text.replace(char, instead)
    return text
