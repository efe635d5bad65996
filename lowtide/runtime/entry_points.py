"""Places that attention kernels are called through, watched by a thread while it records or replays a block.

Without a dispatch mode, which would send every operator through Python: the callable that stands in the place is
replaced for as long as anybody watches, and put back after the last one. Threads that do not watch, and code under
torch.compile, get the kernel itself.
"""

import functools
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch.nn.functional
from torch.compiler import is_compiling

Kernel = Callable[..., Any]


class Observer(Protocol):
    """Runs the kernel calls of the thread that watches, or does what stands for them."""

    def call(self, entry: "EntryPoint", kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``kernel(*args, **kwargs)`` gives."""
        ...


class EntryPoint:
    """One place: attribute ``name`` of ``owner``, a callable or a table of callables.

    Make one a place and process: it counts who watches. autocasts: autocast casts floating-point arguments to its dtype
    before the kernel. leave: keys of a table whose callables go through another entry point themselves.
    """

    def __init__(self, owner: Any, name: str, *, autocasts: bool = False, leave: Collection[Any] = ()) -> None:
        self.owner = owner
        self.name = name
        self.autocasts = autocasts
        self.leave = frozenset(leave)
        self._lock = threading.Lock()
        self._watchers = 0
        self._original: Any = None
        self._seen: Any = None  # what _watched was made of
        self._watched: Any = None

    def install(self) -> None:
        """Begin to watch."""
        if (bias := _bias()) is not None:
            _taught(bias)
        with self._lock:
            if self._watchers == 0:
                self._original = original = getattr(self.owner, self.name)
                if self._seen is None or self._seen != original:
                    self._watch(original)
                setattr(self.owner, self.name, self._watched)
            self._watchers += 1

    def remove(self) -> None:
        """End what ``install`` began. What somebody else has put in the place meanwhile stays there."""
        with self._lock:
            self._watchers -= 1
            if self._watchers == 0:
                if getattr(self.owner, self.name) is self._watched:
                    setattr(self.owner, self.name, self._original)
                self._original = None

    def _watch(self, original: Any) -> None:
        if isinstance(original, Mapping):
            self._seen = dict(original)
            self._watched = {
                key: kernel if key in self.leave else _watched(self, kernel) for key, kernel in original.items()
            }
        else:
            self._seen, self._watched = original, _watched(self, original)


def _watched(entry: EntryPoint, kernel: Kernel) -> Kernel:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return kernel(*args, **kwargs)
        observer = _here.observer
        if observer is None or _is_given_bias(args, kwargs):
            return kernel(*args, **kwargs)
        return observer.call(entry, kernel, args, kwargs)

    return call


def _bias() -> Any:
    """torch's class of masks that know attention by the name that a watched place has; None: nobody has imported it."""
    module = sys.modules.get("torch.nn.attention.bias")
    return None if module is None else module.CausalBias


def _is_given_bias(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what the kernel calls instead comes through the watched place once more."""
    bias = _bias()
    if bias is None or not any(isinstance(value, bias) for value in (*args, *kwargs.values())):
        return False
    _taught(bias)  # it may have been imported since the watching began
    return True


@functools.cache
def _taught(bias: Any) -> None:
    """torch's function keeps asking for attention by that name, also when somebody calls the kernel itself, or has
    imported it by name: it is given whatever has the name."""
    known = bias.__torch_function__.__func__

    def knowing(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = torch.nn.functional.scaled_dot_product_attention if func is TORCHS else func
        return known(cls, asked, types, args, kwargs)

    bias.__torch_function__ = classmethod(functools.wraps(known)(knowing))


class _Here(threading.local):
    observer: Observer | None = None


_here = _Here()


class Watching:
    """Context manager: kernel calls of this thread through ``entries`` go to ``observer``."""

    __slots__ = ("_before", "_installed", "entries", "observer")

    def __init__(self, entries: Sequence[EntryPoint], observer: Observer) -> None:
        self.entries, self.observer = entries, observer
        self._installed: list[EntryPoint] = []
        self._before: Observer | None = None

    def __enter__(self) -> None:
        try:
            for entry in self.entries:
                entry.install()
                self._installed.append(entry)
        except BaseException:
            self._remove()
            raise
        self._before, _here.observer = _here.observer, self.observer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.observer, self._before = self._before, None
        self._remove()

    def _remove(self) -> None:
        while self._installed:
            self._installed.pop().remove()


def unwatched(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``kernel(*args, **kwargs)``; what it calls through other entry points is part of it: the outermost one counts."""
    before, _here.observer = _here.observer, None
    try:
        return kernel(*args, **kwargs)
    finally:
        _here.observer = before


TORCHS: Kernel = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
"""torch's attention, whoever stands in its place in ``torch.nn.functional``."""
SDPA = EntryPoint(torch.nn.functional, "scaled_dot_product_attention", autocasts=True)


def standard_entry_points() -> tuple[EntryPoint, ...]:
    """torch's own. Those of other libraries are registered from outside ``runtime``."""
    return (SDPA,)
