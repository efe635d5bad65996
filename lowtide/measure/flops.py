"""Counts the floating-point operations of what runs, operator by operator. A multiplication with its sum is two."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
    }
)


class FlopCounter(TorchDispatchMode):
    """Context manager: ``total`` grows by the operations of every operator that this thread runs inside it.

    operators: how many were dispatched, views among them. recorded: those of them that autograd records, as one
    of their tensors requires gradients.
    As torch.utils.flop_counter counts: matrix products, convolutions and attention; what is done element by element
    counts nothing. Causal attention counts the pairs of query and key that it looks at, so about half.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.operators = 0
        self.recorded = 0

    def paused(self) -> AbstractContextManager[Any]:
        """Count nothing: for kernels that are compiled when they are called, which a counter disturbs."""
        return _pop_mode_temporarily() if _get_current_dispatch_mode() is self else nullcontext()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard doubles the cost of an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        self.recorded += torch.is_grad_enabled() and _any_requires_grad(args)
        output = func(*args, **kwargs)
        kind = func if isinstance(func, HigherOrderOperator) else func._overloadpacket
        if kind in _ATTENTION:
            self.total += _attention_flops(func, args, kwargs)
        elif kind in flop_registry:
            self.total += flop_registry[kind](*args, **kwargs, out_val=output)
        return output


def _any_requires_grad(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, list | tuple) and _any_requires_grad(value):
            return True
    return False


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, is_causal: bool = False) -> int:
    """Of the two products of attention. query, key, value: (batch, heads, tokens, width); keys may have fewer heads."""
    batch, heads, rows, width = query
    columns = key[2]
    # Row i of causal attention sees the keys up to i.
    narrow = min(rows, columns)
    pairs = narrow * (narrow + 1) // 2 + (rows - narrow) * columns if is_causal else rows * columns
    return 2 * batch * heads * pairs * (width + value[3])


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    shapes = (given[name].shape for name in ("query", "key", "value"))
    return attention_flops(*shapes, is_causal=given.get("is_causal", False))
