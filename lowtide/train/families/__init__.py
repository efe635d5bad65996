"""Families that can be trained: one module a family, with its row in ``ROW``.

Add one: a module like ``flux1``, and its key here.
"""

import importlib
from typing import TYPE_CHECKING

from lowtide import families
from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.train.families.base import TrainRow

TRAINABLE = ("flux1",)


def trainable_key(name: str) -> str:
    """The key of a family by key, title or alias. Raises ConfigError if this version cannot train it."""
    family = families.find(name)
    if family.key not in TRAINABLE:
        raise ConfigError(
            f"this version trains {', '.join(TRAINABLE)} only, not {family.title}. In a training loop of your own, "
            f"lowtide.attach(model) works for {family.title} today"
        )
    return family.key


def train_row(key: str) -> "TrainRow":
    """The row of a trainable family; loads diffusers."""
    return importlib.import_module(f"{__name__}.{key}").ROW
