"""Small blocks for engine tests, and the comparison with a plain run."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.runtime.receipt import Receipt

torch.set_num_threads(1)


class Block(nn.Module):
    """Pre-norm feed-forward block with a residual; counts its forwards."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Composite, so that it is a block, and without a count, so that it compiles once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """Blocks in a row, with ``glue(index, x)`` after each."""

    def __init__(
        self, blocks: list[nn.Module], glue: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.glue = glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.glue is not None:
                x = self.glue(index, x)
        return x


def chain(depth: int = 4, **options: float) -> Chain:
    torch.manual_seed(0)
    return Chain([Block(**options) for _ in range(depth)])  # type: ignore[arg-type]


def compile_each(model: Chain) -> list[Any]:
    """Compile every block by itself, to run as it is; returns the graphs, which come when blocks are called.

    What other tests of this process have compiled is forgotten first: it would be used again for the same class.
    """
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend)  # type: ignore[operator]
    return graphs


def inputs(rows: int = 6, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, run: Callable[[], torch.Tensor], seed: int = 5) -> dict[str, torch.Tensor | None]:
    """Gradients by parameter name after one backward of ``run()``'s squared sum, and the output under 'output'."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = run()
    output.square().sum().backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"output": output.detach().clone(), **found}


def twice(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Gradients by parameter name after two backwards over one graph."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(model)


def second_order(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Gradients by parameter name of the squared gradient of ``x``."""
    model.zero_grad()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> None:
    assert a.keys() == b.keys()
    for name, left in a.items():
        right = b[name]
        assert (left is None) == (right is None), name
        if left is not None and right is not None:
            assert torch.equal(left, right), name


def assert_same_as_plain(
    model: nn.Module, run: Callable[[], torch.Tensor], recomputed: int | None = None, **options: object
) -> Receipt:
    """Attached with ``options``, ``run`` gives the gradients of the plain run, bit for bit; returns the receipt."""
    plain = step(model, run)
    with lowtide.attach(model, **options) as handle:  # type: ignore[arg-type]
        assert_equal(plain, step(model, run))
        receipt = handle.receipt()
    if recomputed is not None:
        assert receipt.totals["recompute_calls"] == recomputed
    assert_equal(plain, step(model, run))
    return receipt
