"""Blocks and stacks that are hard on a segment, and settings to try them with."""

import dataclasses
from typing import Any

import torch
from torch import nn

from tests.runtime.toys import Block

INTERVALS = [{}, {"interval": 2}, {"interval": 3}, {"interval": 2, "segment_stride": 4}]


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    extra: Any = None


class Structured(nn.Module):
    """Takes and returns nested tuples, dicts, dataclasses and None."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = Block(width)

    def forward(self, state: State, pair: tuple[Any, Any], *, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        hidden = self.inner(state.hidden * options["scale"] + pair[0]["shift"])
        return State(hidden, (None, pair[1])), {"hidden": hidden * 2, "none": None}


class StructuredChain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Structured() for _ in range(depth))
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, shift = State(x), self.shift * 2
        for block in self.blocks:
            state, extra = block(state, ({"shift": shift}, None), options={"scale": 0.5, "name": "x"})
        return state.hidden + extra["hidden"]


class ReturnsInput(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x, x[:, :8]


class UsesAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ReturnsInput() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for block in self.blocks:
            x, same, view = block(x)
            total = total + same.sin().sum() + view.cos().sum()
        return x + total


class PopsSkips(nn.Module):
    """A U-shape whose blocks push to and pop from a list that they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Skipping(index < 2) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        return x


class _Skipping(nn.Module):
    def __init__(self, down: bool) -> None:
        super().__init__()
        self.down, self.inner = down, Block()

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        if not self.down:
            return self.inner(x + skips.pop())
        out = self.inner(x)
        skips.append(out)
        return out


class ChangesArgument(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Fails(Block):
    def __init__(self, when: int) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls + 1 == self.when:
            self.calls += 1
            raise MemoryError("no memory left")
        return super().forward(x)
