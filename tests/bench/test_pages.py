"""Markdown and HTML: that everything is in them, and that the page needs nothing else."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from lowtide.bench.batch_plot import batch_drawings
from lowtide.bench.files import write_report
from lowtide.bench.html import html
from lowtide.bench.index import index
from lowtide.bench.markdown import markdown
from lowtide.bench.picture import Picture, svg_of
from lowtide.bench.plot import Sheet, draw, plots, sheets
from lowtide.bench.record import Record
from lowtide.bench.report import build_report
from tests.bench.records import EVERY_STATE, bad, many, ok, receipt

RECORDS = [
    *EVERY_STATE,
    ok("16x1024", "none", peak_gib=20.0, reserved=1.25),
    ok("16x1024", "layer", step_s=1.5),
    bad("failed", "none", "boom", work="sdxl"),
    bad("failed", "layer", "boom", work="sdxl"),
    ok("ltx2_3", depth={"transformer_blocks": 12}),
]


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
    return Page(html(report, plots(report)))


@pytest.fixture(scope="module")
def text() -> str:
    return markdown(build_report(RECORDS), [Picture("a", "A plot", "sd3_medium", ""), Picture("b", "All", None, "")])


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
    assert len(images) == 2
    for image in images:
        kind, _, data = (image["src"] or "").partition(",")
        assert kind == "data:image/svg+xml" and not set(data) & set('&<>"#\n')
        svg = unquote(data)
        assert len(list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"))) > 10
        assert not re.search(r"(href|src)='(?!#)|<text|@import", svg)  # text is drawn: no font is asked for
        assert image["alt"]


def test_the_page_has_every_cell(page: Page) -> None:
    cells = [cell for cell in page.cells if cell]
    assert ["0.7500 / 8.00", "5 steps, 0.75–0.75 s", "1.50 × none · 0.94 × torch"] in [cell[:3] for cell in cells]
    for headline in ("OOM", "failed (RuntimeError: a | b <c>)", "unsupported (no softmax attention)", "not run"):
        assert headline in [cell[0] for cell in cells]
    assert ["inert (offload_attention: attention is recomputed)", "no reference"] in cells
    assert any("H100 0.721 / 7.67 (1.36 × none); L40S 1.607 / 7.62 (1.35 × none)" in cell for cell in cells)


def test_a_truncated_model_is_marked(page: Page, text: str) -> None:
    assert len([attributes for _, attributes in page.tags if attributes.get("class") == "warning"]) == 1
    assert text.count("**Truncated model: ") == 1
    assert "*no reference (truncated)*" in text
    assert "LTXVideo2 2.3 (truncated to 12 transformer\\_blocks)" in text


def test_markdown_tables_are_whole(text: str) -> None:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    unescaped = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    heads = [index for index, row in enumerate(rows) if row.startswith("| ---")]
    for start, end in zip(heads, [*(head - 1 for head in heads[1:]), len(rows)], strict=True):
        assert len(set(unescaped[start - 1 : end])) == 1


@pytest.mark.parametrize("name", ["a|b", "a`b", "a\nb", "a\r\n| b", "``", "*a*", "<b>", "a\u2028b"])
def test_no_name_breaks_a_table(name: str) -> None:
    records = [
        ok(name, name, precision=name, sizes={"B": batch}, receipt=receipt(), peak_gib=batch) for batch in (1, 2)
    ]
    named = markdown(build_report(records)).splitlines()
    plain = markdown(build_report([replaced(record, name) for record in records])).splitlines()
    assert len(named) == len(plain)
    for ours, theirs in zip(named, plain, strict=True):
        assert len(re.findall(r"(?<!\\)\|", ours)) == len(re.findall(r"(?<!\\)\|", theirs))
        assert not re.search(r"(?<!\\)`", ours) and "<b>" not in ours


def replaced(record: Record, name: str) -> Record:
    """With a harmless name instead of this one."""
    plain = {field: "x" for field in ("work", "mode", "precision") if vars(record.condition)[field] == name}
    return replace(record, condition=replace(record.condition, **plain))


def test_the_pages_say_what_comes_out_and_what_fails_without_lowtide(page: Page, text: str) -> None:
    source = html(build_report(RECORDS))
    for words in (
        "layer takes 1.50 × none's time and 0.40 × its peak (1 condition).",
        "25.00 reserved",
        "fails without lowtide, too.",
    ):
        assert words in text and words.replace("'", "&#39;") in source
    assert text.index("What comes out of it") < text.index("## Index")
    assert text.count("fails without lowtide") == 1


def test_plots_stand_in_the_section_of_their_work_and_the_others_above_all(text: str) -> None:
    places = [
        text.index(part) for part in ("![All](images/b.svg)", "## SD3 medium", "![A plot](images/a.svg)", "## LTX")
    ]
    assert places == sorted(places)


def test_the_index_leads_to_every_work(page: Page, text: str) -> None:
    names = [matrix.name for matrix in build_report(RECORDS).matrices]
    assert re.findall(r"\]\(#([^)]*)\)", text) == names
    assert re.findall(r'<a id="([^"]*)"></a>', text) == names
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a" and attributes["href"] != "#-index"] == [
        f"#{name}" for name in names
    ]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert sorted(map(str, ids)) == sorted([*names, "-index"])


def test_markdown_has_every_state(text: str) -> None:
    assert (
        "| layer | **0.7500 / 8.00**<br>5 steps, 0.75–0.75 s<br>1.50 × none · 0.94 × torch<br>*H100 0.721 / 7.67"
        in text
    )
    assert "failed (RuntimeError: a \\| b &lt;c>)" in text
    assert "inert (offload\\_attention: attention is recomputed)<br>*no reference*" in text
    assert "| activation-offload | not run<br>*H100 1.335 / 9.68" in text


def test_figures_of_inert_cells_stand_nowhere(page: Page, text: str) -> None:
    assert not any("0.1000" in part for cell in page.cells for part in cell)
    assert "0.1000" not in text


def test_files_of_a_report(tmp_path: Path) -> None:
    written = write_report(build_report(RECORDS), tmp_path / "out")
    assert [str(path.relative_to(tmp_path / "out")) for path in written[:2]] == ["report.md", "report.html"]
    text = written[0].read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 2 and all((tmp_path / "out" / link).is_file() for link in links)
    again = write_report(build_report(RECORDS), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_a_report_over_a_whole_sweep_stays_one_page_of_a_few_mebibytes() -> None:
    """Of the plots, the fullest of each number of panels stands for all of that number."""
    report = build_report(many())
    assert len(index(report).entries) == sum(len(matrix.columns) for matrix in report.matrices) > 70
    kinds: dict[int, list[Sheet]] = {}
    for sheet in sheets(report):
        kinds.setdefault(len(sheet.panels), []).append(sheet)
    size = len(html(report).encode())
    for found in kinds.values():
        fullest = max(found, key=lambda sheet: sum(len(panel.cells) for panel in sheet.panels))
        size += len(found) * len(Picture("", "", None, svg_of(draw(fullest))).uri)
    batches = [svg_of(drawing) for _, _, drawing in batch_drawings(report)]
    size += sum(len(Picture("", "", None, svg).uri) for svg in batches)
    assert sorted((panels, len(found)) for panels, found in kinds.items()) == [(1, 36), (2, 10), (4, 6)]
    assert len(batches) == 10
    assert size < 6 * 2**20
