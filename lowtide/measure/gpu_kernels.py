"""Operators of which a GPU has one kernel and other devices none: what that kernel saves for backward, for traces."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function


class GpuKernels(TorchFunctionMode):
    """Context manager for a forward on the meta device: RMS norms save their input and one value a row, as on a GPU.

    Composed of smaller operators, as elsewhere, they would save the normalised input as well, and copies in float32.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """torch's, for every mode that was entered before ``GpuKernels``: one that casts arguments by name, say."""
    if has_torch_function((input,)):
        return handle_torch_function(rms_norm, (input,), input, normalized_shape, weight, eps)
    if weight is not None and weight.dtype != input.dtype:  # no kernel takes these: composed on a GPU, too
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # the step itself says it
            return torch.rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Shapes only: values of the meta device do not exist."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dimensions: int, weight: torch.Tensor | None) -> torch.Tensor:
        rows = [*input.shape[:-dimensions], *[1] * dimensions]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return input.new_empty(input.shape)  # contiguous, however the input lies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("a trace has no backward")
