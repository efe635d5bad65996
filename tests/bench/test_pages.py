"""Markdown and HTML: that everything is in them, and that the page needs nothing else."""

import re
from base64 import b64decode
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from lowtide.bench.files import write_report
from lowtide.bench.html import html
from lowtide.bench.markdown import markdown
from lowtide.bench.plot import plots
from lowtide.bench.report import build_report
from tests.bench.records import EVERY_STATE, ok

RECORDS = [*EVERY_STATE, ok("16x1024", "none"), ok("ltx2_3", depth={"transformer_blocks": 12})]


class Page(HTMLParser):
    """What a page holds: its tags, the text in each cell, and whether all that is opened is closed."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open and data.strip():
            self.cells[-1].append(data.strip())


@pytest.fixture(scope="module")
def page() -> Page:
    report = build_report(RECORDS)
    return Page(html(report, {plot.title: plot.svg for plot in plots(report)}))


@pytest.fixture(scope="module")
def text() -> str:
    return markdown(build_report(RECORDS), {"A plot": "images/a.svg"})


def test_the_page_is_well_formed(page: Page) -> None:
    assert page.open == []


def test_the_page_loads_nothing(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base"}
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            if name in attributes:
                assert (attributes[name] or "").startswith(("data:", "#")), (tag, attributes)
    source = (files("lowtide.bench") / "templates" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(", source)


def test_every_image_is_inside_and_is_whole(page: Page) -> None:
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3
    for image in images:
        kind, _, data = (image["src"] or "").partition("base64,")
        assert kind == "data:image/svg+xml;"
        svg = b64decode(data).decode()
        assert svg.rstrip().endswith("</svg>")
        assert not re.search(r"(href|src)=\"(?!#)|<text|@import", svg)  # text is drawn: no font is asked for
        assert image["alt"]


def test_the_page_has_every_cell(page: Page) -> None:
    cells = [cell for cell in page.cells if cell]
    assert ["0.7500 / 8.00", "1.50 × none · 0.94 × torch"] in [cell[:2] for cell in cells]
    for headline in ("OOM", "failed (RuntimeError: a | b <c>)", "unsupported (no softmax attention)", "not run"):
        assert headline in [cell[0] for cell in cells]
    assert ["inert (offload_attention: attention is recomputed)", "no reference"] in cells
    assert any("H100 0.721 / 7.67 (1.36 × none); L40S 1.607 / 7.62 (1.35 × none)" in cell for cell in cells)


def test_a_truncated_model_is_marked(page: Page, text: str) -> None:
    assert [attributes for tag, attributes in page.tags if attributes.get("class") == "truncated"] != []
    assert text.count("**Truncated model:**") == 1
    assert "LTXVideo2 2.3 (truncated to 12 transformer\\_blocks)" in text


def test_markdown_tables_are_whole(text: str) -> None:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    unescaped = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    heads = [index for index, row in enumerate(rows) if row.startswith("| ---")]
    for start, end in zip(heads, [*(head - 1 for head in heads[1:]), len(rows)], strict=True):
        assert len(set(unescaped[start - 1 : end])) == 1
    assert "![A plot](images/a.svg)" in text


def test_markdown_has_every_state(text: str) -> None:
    assert "| layer | **0.7500 / 8.00**<br>1.50 × none · 0.94 × torch<br>*H100 0.721 / 7.67" in text
    assert "failed (RuntimeError: a \\| b &lt;c>)" in text
    assert "inert (offload\\_attention: attention is recomputed)<br>*no reference*" in text
    assert "| unsloth | not run<br>*no reference* |" in text


def test_figures_of_inert_cells_stand_nowhere(page: Page, text: str) -> None:
    assert not any("0.1000" in part for cell in page.cells for part in cell)
    assert "0.1000" not in text


def test_files_of_a_report(tmp_path: Path) -> None:
    written = write_report(build_report(RECORDS), tmp_path / "out")
    assert [str(path.relative_to(tmp_path / "out")) for path in written[:2]] == ["report.md", "report.html"]
    text = written[0].read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 3 and all((tmp_path / "out" / link).is_file() for link in links)
    again = write_report(build_report(RECORDS), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
