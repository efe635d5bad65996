"""Families that can be trained: one module a family, with its row in ``ROW``.

Add one: a module like ``flux1``, and its key here.
"""

import importlib

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.train.families.base import Denoiser, Encoders, TrainRow

__all__ = ["TRAINABLE", "Denoiser", "Encoders", "TrainRow", "trainable_key", "train_row"]

TRAINABLE = ("flux1",)


def trainable_key(name: str) -> str:
    """The key of a family by key, title or alias. Raises ConfigError if this version cannot train it."""
    key = families.find(name).key
    if key not in TRAINABLE:
        raise ConfigError(
            f"model_family {name!r}: this version trains {', '.join(TRAINABLE)} only. In a training loop of your own, "
            f"lowtide.attach(model) works for {families.find(name).title} today"
        )
    return key


def train_row(key: str) -> TrainRow:
    """The row of a trainable family; loads diffusers."""
    return importlib.import_module(f"{__name__}.{key}").ROW
