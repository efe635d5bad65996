"""A report on disk: Markdown with its plots beside it, and the page that needs nothing else."""

from pathlib import Path

from lowtide.bench.html import html
from lowtide.bench.markdown import markdown
from lowtide.bench.plot import plots
from lowtide.bench.report import Report

_IMAGES = "images"


def write_report(report: Report, out: Path) -> list[Path]:
    """Write ``report.md``, ``report.html`` and ``images/*.svg`` into a folder: what was written, in that order."""
    pictures = plots(report)
    (out / _IMAGES).mkdir(parents=True, exist_ok=True)
    texts = {
        out / "report.md": markdown(report, pictures, _IMAGES),
        out / "report.html": html(report, pictures),
        **{out / _IMAGES / f"{picture.name}.svg": picture.svg for picture in pictures},
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)
