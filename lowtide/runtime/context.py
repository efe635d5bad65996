"""What a block's computation depends on beside its arguments, captured at a call and restored for its replay.

Rule 11: every call captures its own context, not the segment once; glue may draw a random number in between.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch


@dataclass(frozen=True)
class Provider:
    """One piece of process or thread state: ``get`` reads it, ``enter(value)`` holds it for a while."""

    name: str
    get: Callable[[], Any]
    enter: Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def _held(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _autocast(device: str) -> Provider:
    def get() -> tuple[bool, torch.dtype, bool]:
        return (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )

    def enter(value: tuple[bool, torch.dtype, bool]) -> AbstractContextManager[Any]:
        enabled, dtype, cache = value
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    return Provider(f"autocast[{device}]", get, enter)


def _attention_flags() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )


def _set_attention_flags(value: tuple[Any, ...]) -> None:
    cuda = torch.backends.cuda
    flash, efficient, math, cudnn, order = value
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)
    torch._C._set_sdp_priority_order(list(order))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


@contextmanager
def _function_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    before = list(_get_current_function_mode_stack())
    for _ in before:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in before:
            _push_mode(mode)


@contextmanager
def _dispatch_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    # Pushed without __enter__: a counter that has ended must not start again and lose what it counted.
    with ExitStack() as pushed:
        for mode in modes:
            dispatch._push_mode(mode)
            pushed.callback(dispatch._pop_mode)
        yield


def _missing_dispatch_modes(wanted: tuple[Any, ...]) -> AbstractContextManager[Any]:
    active = dispatch._get_current_dispatch_mode_stack()
    return _dispatch_modes(tuple(mode for mode in wanted if not any(mode is other for other in active)))


def _function_stack() -> tuple[Any, ...]:
    return tuple(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else ()


def _dispatch_stack() -> tuple[Any, ...]:
    return tuple(dispatch._get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else ()


def _held_by(read: Callable[[], Any], write: Callable[[Any], Any]) -> Callable[[Any], AbstractContextManager[Any]]:
    return lambda value: _held(read, write, value)


def accelerator() -> str | None:
    """Device type of the accelerator of this machine ('cuda', 'mps', …), or None."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and torch.accelerator.is_available() else None


def standard_providers() -> tuple[Provider, ...]:
    """The state that torch itself keeps. Other libraries' state is registered from outside ``runtime``."""
    devices = ["cpu"] + ([name] if (name := accelerator()) else [])
    precision = torch.get_float32_matmul_precision
    return (
        *(_autocast(device) for device in devices),
        Provider(
            "default dtype",
            torch.get_default_dtype,
            _held_by(torch.get_default_dtype, torch.set_default_dtype),
        ),
        Provider("attention kernels", _attention_flags, _held_by(_attention_flags, _set_attention_flags)),
        Provider("deterministic algorithms", _deterministic, _held_by(_deterministic, _set_deterministic)),
        Provider("float32 matmul precision", precision, _held_by(precision, torch.set_float32_matmul_precision)),
        Provider("torch function modes", _function_stack, _function_modes),
        Provider("dispatch modes", _dispatch_stack, _missing_dispatch_modes),
    )


class Context:
    """The providers of one handle: captures all their values as a tuple, re-enters those that differ."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        self.providers = tuple(providers)
        self._getters = tuple(provider.get for provider in self.providers)

    def capture(self) -> tuple[Any, ...]:
        return tuple([get() for get in self._getters])

    def differs(self, captured: tuple[Any, ...]) -> bool:
        return captured != self.capture()

    @contextmanager
    def restored(self, captured: tuple[Any, ...]) -> Iterator[None]:
        with ExitStack() as stack:
            for provider, value in zip(self.providers, captured, strict=True):
                if provider.get() != value:
                    stack.enter_context(provider.enter(value))
            yield


class RandomState:
    """Random state of the CPU, of the accelerators in use and of the generators among a call's arguments."""

    __slots__ = ("states",)

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, state in self.states:
            generator.set_state(state)


def default_generators(kind: str | None, devices: set[torch.device]) -> list[torch.Generator]:
    """The CPU's generator and, for an accelerator of type ``kind``, those of ``devices`` and of the current one."""
    generators = [torch.default_generator]
    if kind == "cuda" and torch.cuda.is_initialized():
        indices = {device.index for device in devices if device.type == kind and device.index is not None}
        indices.add(torch.cuda.current_device())
        generators += [torch.cuda.default_generators[index] for index in sorted(indices)]
    elif kind == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    elif kind == "xpu" and torch.xpu.is_initialized():
        generators += list(torch.xpu.default_generators)
    return generators
