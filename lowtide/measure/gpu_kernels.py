"""Operators of which a GPU has one kernel and other devices none: what that kernel saves for backward, for traces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class GpuKernels(TorchFunctionMode):
    """Context manager for a forward on the meta device: RMS norms save their input and one value a row, as on a GPU.

    Composed of smaller operators, as elsewhere, they would save the normalised input as well, and copies in float32.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _RmsNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Shapes only: values of the meta device do not exist."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dimensions: int, weight: torch.Tensor | None) -> torch.Tensor:
        rows = [*input.shape[:-dimensions], *[1] * dimensions]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("a trace has no backward")
