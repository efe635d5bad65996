"""What a block's computation depends on beside its arguments, captured at a call and restored for its replay.

Rule 11: every call captures its own context, not the segment once; glue may draw a random number in between.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch


@dataclass(frozen=True)
class Provider:
    """One piece of process or thread state: ``getters`` read it, ``enter(*values)`` holds it for a while.

    decided_late: of the getters, those whose value is not the one in use until the state is used for the first time.
    """

    name: str
    getters: tuple[Callable[[], Any], ...]
    enter: Callable[..., AbstractContextManager[Any]]
    decided_late: tuple[Callable[[], Any], ...] = ()


@contextmanager
def _held(write: Callable[..., Any], before: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[None]:
    write(*values)
    try:
        yield
    finally:
        write(*before)


def _setting(
    name: str,
    write: Callable[..., Any],
    *getters: Callable[[], Any],
    decided_late: tuple[Callable[[], Any], ...] = (),
) -> Provider:
    """State that is read by ``getters`` and written back by one call."""
    return Provider(name, getters, lambda *values: _held(write, tuple(get() for get in getters), values), decided_late)


def _autocast(device: str) -> Provider:
    def enter(enabled: bool, dtype: torch.dtype, cache: bool) -> AbstractContextManager[Any]:
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    getters = (
        functools.partial(torch.is_autocast_enabled, device),
        functools.partial(torch.get_autocast_dtype, device),
        torch.is_autocast_cache_enabled,
    )
    return Provider(f"autocast[{device}]", getters, enter)


def _attention_kernels() -> Provider:
    def write(flash: bool, efficient: bool, math: bool, cudnn: bool, order: list[int]) -> None:
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        torch.backends.cuda.enable_math_sdp(math)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch._C._set_sdp_priority_order(order)

    core = torch._C  # read through C: the public readers wrap these, and are called at every block
    return _setting(
        "attention kernels",
        write,
        core._get_flash_sdp_enabled,
        core._get_mem_efficient_sdp_enabled,
        core._get_math_sdp_enabled,
        core._get_cudnn_sdp_enabled,
        core._get_sdp_priority_order,
        # torch puts cuDNN first on Hopper and Blackwell, at the first attention of a process
        decided_late=(core._get_sdp_priority_order,),
    )


def _set_deterministic(enabled: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


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
def _dispatch_modes(wanted: tuple[Any, ...]) -> Iterator[None]:
    # Pushed without __enter__: a counter that has ended must not start again and lose what it counted.
    active = dispatch._get_current_dispatch_mode_stack()
    with ExitStack() as pushed:
        for mode in wanted:
            if not any(mode is other for other in active):
                dispatch._push_mode(mode)
                pushed.callback(dispatch._pop_mode)
        yield


def _function_stack() -> tuple[Any, ...]:
    return tuple(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else ()


def _dispatch_stack() -> tuple[Any, ...]:
    return tuple(dispatch._get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else ()


def accelerator() -> str | None:
    """Device type of the accelerator of this machine ('cuda', 'mps', …), or None."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and torch.accelerator.is_available() else None


def standard_providers() -> tuple[Provider, ...]:
    """The state that torch itself keeps. Other libraries' state is registered from outside ``runtime``."""
    devices = ["cpu"] + ([name] if (name := accelerator()) else [])
    return (
        *(_autocast(device) for device in devices),
        _setting("default dtype", torch.set_default_dtype, torch.get_default_dtype),
        _attention_kernels(),
        _setting(
            "deterministic algorithms",
            _set_deterministic,
            torch.are_deterministic_algorithms_enabled,
            torch.is_deterministic_algorithms_warn_only_enabled,
        ),
        _setting("float32 matmul", torch.set_float32_matmul_precision, torch._C._get_float32_matmul_precision),
        Provider("torch function modes", (_function_stack,), _function_modes),
        Provider("dispatch modes", (_dispatch_stack,), _dispatch_modes),
    )


class Context:
    """The providers of one handle: captures all their values as one list, re-enters those that differ."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        self.providers = tuple(providers)
        self._getters = tuple(get for provider in self.providers for get in provider.getters)
        late = [get for provider in self.providers for get in provider.decided_late]
        self._late = [(number, get) for number, get in enumerate(self._getters) if get in late]

    def capture(self) -> list[Any]:
        return [get() for get in self._getters]

    def settle(self, captured: list[Any]) -> None:
        """Once the call is over: what the state it used has turned out to be (rule 11)."""
        for number, get in self._late:
            captured[number] = get()

    @contextmanager
    def restored(self, captured: list[Any]) -> Iterator[None]:
        start = 0
        with ExitStack() as stack:
            for provider in self.providers:
                values = captured[start : start + len(provider.getters)]
                start += len(provider.getters)
                if [get() for get in provider.getters] != values:
                    stack.enter_context(provider.enter(*values))
            yield


RandomStates = list[tuple[torch.Generator, torch.Tensor]]


def read_random(generators: Iterable[torch.Generator]) -> RandomStates:
    """Random state of the CPU, of the accelerators in use and of the generators among a call's arguments."""
    return [(generator, generator.get_state()) for generator in generators]


def write_random(states: RandomStates) -> None:
    for generator, state in states:
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
