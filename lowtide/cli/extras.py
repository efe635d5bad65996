"""Which extra of this package brings a library."""

import importlib.metadata
import re

_EXTRAS = ("diffusers", "train", "bench", "quant")
"""What people install, the smallest first."""
_DISTRIBUTIONS = {"PIL": "pillow"}
"""Of modules that have another name than what is installed."""


def extra_with(module: str) -> str | None:
    """The first extra that has the distribution of a module (``PIL.Image``); None: no extra has."""
    top = module.partition(".")[0]
    name = _DISTRIBUTIONS.get(top, top)
    try:
        requirements = importlib.metadata.requires("lowtide") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    brought = [requirement for requirement in requirements if re.match(rf"{re.escape(name)}\b(?!-)", requirement)]
    return next((extra for extra in _EXTRAS if any(_is_of(extra, requirement) for requirement in brought)), None)


def _is_of(extra: str, requirement: str) -> bool:
    return re.search(rf"""extra == ['"]{extra}['"]""", requirement) is not None
