"""``lowtide.checkpoint``: one region recomputed in backward; a drop-in for ``torch.utils.checkpoint.checkpoint``."""

import difflib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _saved_tensors_hooks_is_enabled  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from lowtide.attention_backend import has_own_state, providers
from lowtide.errors import ConfigError
from lowtide.offload import shared_store, size
from lowtide.plan.schedule import MAX_SIZES, MIN_BYTES
from lowtide.runtime.context import Context, accelerator, default_generators
from lowtide.runtime.flatten import flatten_call, is_filled
from lowtide.runtime.link import simulated
from lowtide.runtime.placeholder import packs_outside
from lowtide.runtime.segment import Call, Nesting, Segment

BACKENDS = ("torch", "unsloth")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    backend: str = "torch",
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    offload_min_bytes: int | str = MIN_BYTES,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, whose saved tensors are dropped and recomputed in backward.

    backend: with ``"unsloth"``, arguments of at least offload_min_bytes wait for backward in CPU memory.
    Takes torch's keywords. ``use_reentrant=True`` is refused: gradients of arguments without requires_grad would be
    lost. ``determinism_check="none"`` compares nothing; by default shapes and dtypes are compared and, for CPU tensors,
    a few values; ``debug=True`` compares values of every saved tensor on every device. Arguments and closed-over
    variables are seen in backward as they were at the call, lists and dicts included; other objects by identity.

    Raises ConfigError for a wrong keyword, or offload without an accelerator; ReplayError in backward where the
    recomputation differs from the forward.
    """
    _check_options(backend, use_reentrant, determinism_check)
    if get_eval_frame_callback() is not None:  # called from compiled code: run eagerly, as the recomputation will
        return _eager_checkpoint()(
            function,
            *args,
            backend=backend,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            offload_min_bytes=offload_min_bytes,
            **kwargs,
        )
    if not torch.is_grad_enabled() or not _saved_tensors_hooks_is_enabled():
        return function(*args, **kwargs)
    store = None
    if backend == "unsloth":
        store = shared_store(size(offload_min_bytes, "offload_min_bytes"), MAX_SIZES, simulated.get())
        if packs_outside() is not None:  # rule 23: whoever is outside packs the arguments
            store = None
    forward_context, replay_context = context_fn() if context_fn is not None else (None, None)
    arguments, leaves = flatten_call((function, *args), kwargs, opaque=True)
    context, kind, nesting = _surroundings(has_own_state())
    hold, flush = (store.move_later, store.flush) if store is not None else (None, None)
    segment = Segment(context, kind, nesting, early_stop=early_stop, hold=hold, flush=flush)
    call = Call(_name(function), _Region(forward_context, replay_context), modules_of(function))
    call.compared = determinism_check != "none"
    call.spot_check = call.compared
    call.debug = debug
    devices = {tensor.device for tensor in leaves}
    generators = [*default_generators(kind, devices), *leaves.generators] if preserve_rng_state else []
    if store is not None:
        store.enter_block(id(segment), call.name)
    segment.record(call, arguments, leaves, generators)
    try:
        return segment.run(call, (function, *args), kwargs, leaves, register_outputs=False)
    finally:
        if store is not None:
            store.leave_block()


checkpoint.__dict__["_torchdynamo_disable"] = True  # dynamo calls it instead of looking inside


@functools.cache
def _eager_checkpoint() -> Callable[..., Any]:
    return torch.compiler.disable(checkpoint)


@functools.cache
def _surroundings(with_diffusers: bool) -> tuple[Context, str | None, Nesting]:
    return Context(providers()), accelerator(), Nesting()


class _Region:
    """Calls its first argument; in the forward inside one context manager, on recomputation inside the other."""

    __slots__ = ("after", "first")

    def __init__(self, first: AbstractContextManager[Any] | None, after: AbstractContextManager[Any] | None) -> None:
        self.first, self.after = first, after

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context, self.first = self.first, self.after
        with context if context is not None else nullcontext():
            return function(*args, **kwargs)


def _check_options(backend: str, use_reentrant: bool | None, determinism_check: str) -> None:
    if backend not in BACKENDS:
        near = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"backend: {backend!r} is not one of {', '.join(map(repr, BACKENDS))}{hint}")
    if use_reentrant:
        raise ConfigError(
            "use_reentrant=True is refused: a reentrant checkpoint loses gradients where no argument needs one "
            "(a LoRA on a frozen model). Leave it out or pass False."
        )
    if determinism_check not in ("default", "none"):
        raise ConfigError(f"determinism_check: {determinism_check!r} is not one of 'default', 'none'")


def _name(function: Callable[..., Any]) -> str:
    owner = function.__self__ if isinstance(function, MethodType) else function
    return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(function, "__qualname__", repr(function))


def modules_of(function: Callable[..., Any]) -> tuple[nn.Module, ...] | None:
    """The modules that a function runs, as far as its closure and globals show them; None where none is seen.

    With none known, the region is recomputed to its end: an early stop could skip hooks (rule 12 in segment.py).
    """
    if isinstance(function, nn.Module):
        return (function,)
    if isinstance(function, MethodType):
        return (function.__self__,) if isinstance(function.__self__, nn.Module) else None
    if not isinstance(function, FunctionType):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    modules = tuple(value for value in (*cells, *named, *(function.__defaults__ or ())) if isinstance(value, nn.Module))
    return modules or None
