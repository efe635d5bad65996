"""Which sizes a model can take: what its family's row divides them by, and the patches of its configuration."""

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ConfigError
from lowtide.families.row import Build

_LATENT_SIDES = {"H": "h", "W": "w"}
SIZE_WORDS = {"B": "batch", "FR": "frames", "SEC": "seconds", "W": "width", "H": "height", "T": "text tokens"}
"""The sizes of inputs that people know by a word."""
_CHECKED = ("FR", "H", "W")


@dataclass(frozen=True)
class Allowed:
    """The sizes n * step + offset, from ``step`` or ``offset`` on."""

    step: int
    offset: int = 0

    def has(self, size: int) -> bool:
        return size >= (self.offset or self.step) and (size - self.offset) % self.step == 0

    def nearest(self, size: int) -> list[int]:
        """The allowed size below, if there is one, and the one above."""
        below = (size - self.offset) // self.step * self.step + self.offset
        return [near for near in (below, below + self.step) if self.has(near)]

    @property
    def text(self) -> str:
        return f"a multiple of {self.step}" + (f" plus {self.offset}" if self.offset else "")


def allowed_sizes(build: Build, config: Mapping[str, Any]) -> dict[str, Allowed]:
    """By name, of frames and sides; others may be anything.

    A family's row says how a size becomes one of latents: ``H//8``, ``(FR-1)//4+1``: what would be cut off is not
    allowed. A row that rounds up instead takes any size. Where the model gets pictures and cuts them into patches
    itself, a side of the latents is a multiple of its configuration's ``patch_size``.
    """
    found: dict[str, Allowed] = {}
    for name in build.vars.keys() & set(_CHECKED):
        for size in _divided(name, build.let.values()):
            patch = _patch(build, config, _LATENT_SIDES.get(name))
            found[name] = Allowed(size.step * patch, size.offset)
    return found


def check_sizes(sizes: Mapping[str, int], allowed: Mapping[str, Allowed]) -> None:
    """Raises ConfigError for a size that the model cannot take, with the nearest that it can."""
    for name, size in sizes.items():
        if name in allowed and not allowed[name].has(size):
            near = " or ".join(map(str, allowed[name].nearest(size)))
            raise ConfigError(
                f"{SIZE_WORDS[name]} {size} is not allowed: this model takes {allowed[name].text}. The nearest: {near}"
            )


def _divided(name: str, expressions: Iterator[str] | Any) -> Iterator[Allowed]:
    """What the expressions divide a size by, so that nothing is left over: at most one answer is expected."""
    for expression in expressions:
        for node in ast.walk(ast.parse(expression, mode="eval")):
            match node:
                case ast.BinOp(left=ast.Name(id=found), op=ast.FloorDiv(), right=ast.Constant(value=int(step))):
                    offset = 0
                case ast.BinOp(
                    left=ast.BinOp(left=ast.Name(id=found), op=ast.Sub(), right=ast.Constant(value=int(offset))),
                    op=ast.FloorDiv(),
                    right=ast.Constant(value=int(step)),
                ):
                    pass
                case _:
                    continue
            if found == name:
                yield Allowed(step, offset)


def _patch(build: Build, config: Mapping[str, Any], side: str | None) -> int:
    patch = config.get("patch_size")
    shapes = [node["shape"] for node in build.inputs.values() if isinstance(node, dict) and "shape" in node]
    if side is None or patch is None or not any(side in shape for shape in shapes):
        return 1
    return math.lcm(*patch[-2:]) if isinstance(patch, list | tuple) else int(patch)
