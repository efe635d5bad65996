"""A report as one HTML page that needs nothing else: no script, no font, every figure inside."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from lowtide.bench import index, scaling
from lowtide.bench.details import details
from lowtide.bench.failures import failures
from lowtide.bench.findings import findings
from lowtide.bench.picture import Picture
from lowtide.bench.report import LEGEND, Report


def html(report: Report, pictures: Sequence[Picture] = ()) -> str:
    """Pictures stand in the page as data: two of them share no names of each other's parts."""
    environment = Environment(
        loader=PackageLoader("lowtide.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        report=report,
        pictures=pictures,
        index=index,
        scaling=scaling,
        details=details,
        failures=failures,
        findings=list(findings(report)),
        legend=LEGEND,
    )
