"""A report as one HTML page that needs nothing else: no script, no font, every figure inside."""

from base64 import b64encode
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from lowtide.bench.details import details
from lowtide.bench.report import LEGEND, Report


def html(report: Report, images: Mapping[str, str] | None = None) -> str:
    """images: title → SVG of a plot. It stands in the page as data: two plots share no names of each other's parts."""
    environment = Environment(
        loader=PackageLoader("lowtide.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    inlined = {title: _data_uri(svg) for title, svg in (images or {}).items()}
    return environment.get_template("report.html").render(report=report, images=inlined, details=details, legend=LEGEND)


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
