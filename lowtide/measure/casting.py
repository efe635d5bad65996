"""Autocast for the meta device, which torch's own does not know: what a trace of shapes saves is then as wide as in a
step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_IN_BFLOAT16 = frozenset(
    {
        "__matmul__", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "einsum", "linear", "matmul", "mm", "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)  # fmt: skip
_IN_FLOAT32 = frozenset(
    {
        "__pow__", "cumsum", "exp", "group_norm", "layer_norm", "log", "log_softmax", "logsumexp", "mse_loss", "norm",
        "pow", "prod", "reciprocal", "rsqrt", "softmax", "softplus", "sum",
    }
)  # fmt: skip
"""What accelerators compute in float32; on the CPU torch leaves these alone."""


def casts_rms_norm() -> bool:
    """Whether accelerators compute it in float32: torch 2.11 leaves it alone, 2.13 does not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


class Casting(TorchFunctionMode):
    """Casts arguments as ``torch.autocast(device.type, torch.bfloat16)`` does, for what denoisers call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        in_float32 = _IN_FLOAT32 | {"rms_norm"} if casts_rms_norm() else _IN_FLOAT32
        self._in_float32: frozenset[str] = frozenset() if device.type == "cpu" else in_float32
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        dtype = torch.bfloat16 if name in _IN_BFLOAT16 else torch.float32 if name in self._in_float32 else None
        if dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, functools.partial(self._cast, dtype), (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _cast(self, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        """Weights that are trained once, as autocast does, which keeps that until it ends."""
        if tensor.dtype == dtype or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return tensor
        if dtype is torch.float32 or not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]
