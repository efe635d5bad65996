"""Warnings that point at whoever called lowtide, however deep inside it they arise. Imports nothing of it."""

import sys
import warnings


def warn_caller(text: str) -> None:
    """A UserWarning whose place is the first line outside of this package."""
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
