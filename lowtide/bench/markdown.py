"""A report as Markdown, for a repository: the figures of ``plot`` lie beside it as files."""

from collections.abc import Iterable, Iterator, Sequence

from lowtide.bench import index, scaling
from lowtide.bench.details import details
from lowtide.bench.failures import failures
from lowtide.bench.findings import findings
from lowtide.bench.picture import Picture
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


def markdown(report: Report, pictures: Sequence[Picture] = (), folder: str = "images") -> str:
    """folder: where the pictures lie, as the page should name it: ``FOLDER/NAME.svg``."""
    lines = ["# Benchmark report", "", *_list(f"**{term}**: {meaning}" for term, meaning in LEGEND.items())]
    lines += [*_machines(report), *(f"Public figures: {source}." for source in report.sources), ""]
    lines += [*_findings(report), *_index(report), *_shown(pictures, None, folder)]
    for matrix in report.matrices:
        lines += ["", *_matrix(matrix, list(_shown(pictures, matrix.name, folder)))]
    return "\n".join(lines) + "\n"


def _list(texts: Iterable[str]) -> Iterator[str]:
    yield from (f"- {text}" for text in texts)
    yield ""


def _findings(report: Report) -> Iterator[str]:
    found = list(findings(report))
    if found:
        yield "## What comes out of it"
        yield ""
        yield from _list(map(_text, found))


def _index(report: Report) -> Iterator[str]:
    found = index.index(report)
    yield "## Index"
    yield ""
    yield index.EXPLAINED + (f" In all lines: {_text(found.common)}." if found.common else "")
    yield ""
    rows = ([f"[{_text(entry.title)}](#{entry.name})", *map(_text, entry.cells)] for entry in found.entries)
    yield from _table(index.HEADS, rows)


def _shown(pictures: Iterable[Picture], section: str | None, folder: str) -> Iterator[str]:
    for picture in pictures:
        if picture.section == section:
            yield ""
            yield f"![{_text(picture.title)}]({folder}/{picture.name}.svg)"


def _machines(report: Report) -> Iterator[str]:
    for machine in report.machines:
        facts = ", ".join(f"{name} {text}" for name, text in machine.facts.items())
        yield f"- **{machine.card}**, {machine.records_in_words}: {_text(facts)}"
    yield ""


def _matrix(matrix: Matrix, pictures: Iterable[str]) -> Iterator[str]:
    yield f'<a id="{matrix.name}"></a>\n\n## {_text(matrix.title)}'
    yield ""
    yield from (f"**{warning}**\n" for warning in matrix.warnings)
    yield f"{_text(matrix.common)}." if matrix.common else ""
    yield from (f"\n⚠ {_text(note)}" for note in failures(matrix))
    for remark in matrix.published.remarks if matrix.published else ():
        yield f"Public figures: {remark}."
    yield ""
    heads = [_head(column.title, column.differs) for column in matrix.columns]
    yield from _table(["mode", *heads], ([_text(mode), *map(_cell, cells)] for mode, cells in matrix.rows))
    for found in scaling.scalings(matrix):
        yield from _scaling(found)
    yield from pictures
    yield from _details(matrix)


def _scaling(found: scaling.Scaling) -> Iterator[str]:
    yield f"\n{scaling.EXPLAINED} {_text(found.title)}.\n"
    heads = [f"batch {batch}" for batch in found.batches]
    rows = ([_text(row.mode), *(f"**{text}**" if best else text for text, best in row.texts)] for row in found.rows)
    yield from _table(["mode", *heads], rows)


def _details(matrix: Matrix) -> Iterator[str]:
    yield "\n<details><summary>Behind the cells</summary>\n"
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
    return "<br>".join(
        filter(None, (headline, cell.reserved, cell.steps, cell.ratios, *remarks, f"*{cell.reference}*"))
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(heads)
    yield _row(["---"] * len(heads))
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Text that cannot end its cell, nor become a tag or an emphasis."""
    for char, instead in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("`", "\\`")):
        text = text.replace(char, instead)
    return " ".join(text.splitlines())
