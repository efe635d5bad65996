"""How modes look in plots: one colour and one mark for each kind of mode."""

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.lines import Line2D

from lowtide.bench.describe import offloads, plans

FRONTIER = "#90cdf4"
DARK, GREY = "#1a202c", "#718096"


@dataclass(frozen=True)
class Style:
    label: str
    marker: str
    color: str
    size: float

    @property
    def ours(self) -> bool:
        return self in (RECOMPUTES, OFFLOADS, PLANS)


RECOMPUTES = Style("lowtide, recomputation", "o", "#2b6cb0", 6.5)
OFFLOADS = Style("lowtide, CPU offload", "^", "#d53f8c", 7.0)
PLANS = Style("lowtide, auto", "P", "#6b46c1", 8.5)
_THEIRS = {
    "none": Style("nothing recomputed", "*", DARK, 12),
    "torch-checkpoint": Style("torch's own checkpoint", "s", "#ed8936", 10.5),
    "diffusers": Style("diffusers' own checkpointing", "D", "#48bb78", 9.5),
}


def style(mode: str) -> Style:
    return _THEIRS.get(mode, PLANS if plans(mode) else OFFLOADS if offloads(mode) else RECOMPUTES)


def legend(modes: Iterable[str]) -> list[Line2D]:
    """An entry for each kind of mode that there is, and one for the frontier."""
    found = {style(mode) for mode in modes}
    marks = [
        Line2D([], [], linestyle="", marker=s.marker, color=s.color, markersize=s.size, label=s.label)
        for s in (*_THEIRS.values(), RECOMPUTES, OFFLOADS, PLANS)
        if s in found
    ]
    return [*marks, Line2D([], [], color=FRONTIER, linewidth=1.6, label="Pareto frontier")]
