"""A finished drawing of a report."""

import re
from dataclasses import dataclass
from io import BytesIO
from urllib.parse import quote

import matplotlib
from matplotlib.figure import Figure

_LONG_FRACTION = re.compile(r"(\.\d{3})\d+")  # thousandths of a point are enough, and half of the file is coordinates
_IN_A_URI = " /:=;,'()*!$+?@[]|{}^`"


@dataclass(frozen=True)
class Picture:
    """name: for a file. section: the matrix that it belongs to; None: it stands above all of them.

    svg: the whole drawing; its text is drawn, so that it needs no font.
    """

    name: str
    title: str
    section: str | None
    svg: str

    @property
    def uri(self) -> str:
        """The SVG as data, fit for an attribute in double quotes of a page: it has no character that HTML escapes."""
        bare = re.sub(r"<!--.*?-->", "", self.svg, flags=re.DOTALL)
        line = " ".join(re.sub(r">\s+<", "><", bare).split()).replace('"', "'")
        return f"data:image/svg+xml,{quote(line, safe=_IN_A_URI)}"


def svg_of(drawing: Figure) -> str:
    """The same text for the same report: no date, and names of parts that do not change."""
    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "lowtide"}):
        drawing.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _LONG_FRACTION.sub(r"\1", buffer.getvalue().decode())
