"""A report on disk: Markdown with its plots beside it, and the page that needs nothing else."""

from pathlib import Path

from lowtide.bench.html import html
from lowtide.bench.markdown import markdown
from lowtide.bench.plot import plots
from lowtide.bench.report import Report

_IMAGES = "images"


def write_report(report: Report, out: Path) -> list[Path]:
    """Write ``report.md``, ``report.html`` and ``images/*.svg`` into a folder: what was written, in that order."""
    drawn = plots(report)
    (out / _IMAGES).mkdir(parents=True, exist_ok=True)
    links = {plot.title: f"{_IMAGES}/{plot.name}.svg" for plot in drawn}
    texts = {
        out / "report.md": markdown(report, links),
        out / "report.html": html(report, {plot.title: plot.svg for plot in drawn}),
        **{out / links[plot.title]: plot.svg for plot in drawn},
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
