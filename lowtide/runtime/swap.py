"""Intercepts a module by swapping its class for a generated subclass with ``__call__`` overridden.

Names, isinstance, state_dict keys, deep copies and forward patches by other libraries keep working; only look-ups by
exact class see the difference (attach last, or register the generated class there).

Rules (the numbering of segment.py goes on):
15. One generated class an original class and handle. FSDP2 wraps by class, compile makes one graph a class, and gives
    up after some: handles that follow each other on one model share theirs (Routes).
16. The interceptor is closed to dynamo: under torch.compile(model) the blocks run eagerly, and the receipt says so.
17. No metaclass tricks: FSDP2's class cache would bypass the engine.
18. Pickles and deep copies come back as the original class, un-attached.
19. Putting the class back happens only where the class is still ours; otherwise an inactive pass-through stays.
"""

import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from lowtide.errors import ConfigError

_MARK = "_lowtide_original"
_INTERCEPTOR = "_lowtide_interceptor"
_WHY_CLOSED = "lowtide records and recomputes this module outside compiled code; compile the blocks themselves instead"


class Interceptor(Protocol):
    """What calls go through: a Tracer, say. active: whether it does anything yet."""

    @property
    def active(self) -> bool: ...

    def run(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any: ...

    def run_eagerly(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any: ...


class Routes:
    """An interceptor that passes calls on to another one, which may change: the classes that were generated for it are
    used again, so that what was compiled for them stays valid."""

    _target: Interceptor

    def __init__(self) -> None:
        self.classes: dict[type[nn.Module], type[nn.Module]] = {}

    def to(self, target: Interceptor) -> "Routes":
        """The same, leading there. Before this it leads nowhere, and nothing can be intercepted with it."""
        self._target = target
        return self

    @property
    def active(self) -> bool:
        return self._target.active

    def run(self, *call: Any) -> Any:
        return self._target.run(*call)

    def run_eagerly(self, *call: Any) -> Any:
        return self._target.run_eagerly(*call)


def rebuild(original: type[nn.Module]) -> nn.Module:
    """Unpickles a block that was attached: an instance of its original class."""
    return original.__new__(original)


def is_attached(module: nn.Module) -> bool:
    """Whether a handle intercepts the module. An inactive pass-through (rule 19) is in nobody's way."""
    interceptor: Interceptor | None = getattr(type(module), _INTERCEPTOR, None)
    return interceptor is not None and interceptor.active


def intercept(
    modules: Iterable[tuple[str, nn.Module]],
    interceptor: Interceptor,
    *,
    around: bool = False,
    forward: bool = False,
) -> None:
    """Route every call of ``modules`` through ``interceptor``. ConfigError where one is attached already.

    around: those of an attached module, too; what comes last is to be released first. forward: calls of ``forward``,
    too, which PEFT's wrappers make; a call of the module then comes through twice.
    """
    modules = list(modules)
    taken = [name for name, module in modules if is_attached(module) and not around]
    if taken:
        raise ConfigError(
            f"{taken[0]} is attached already ({len(taken)} of {len(modules)} blocks are). Call `detach()` on the "
            "handle of the first `attach` before attaching with other settings. Where that is lost: a `copy.deepcopy` "
            "of the model is not attached."
        )
    classes = interceptor.classes if isinstance(interceptor, Routes) else {}
    for _, module in modules:
        original = type(module)
        if original not in classes:
            classes[original] = _generate(original, interceptor, forward)
        module.__class__ = classes[original]


def release(modules: Iterable[nn.Module], interceptor: Interceptor) -> None:
    """Put the original classes back, where they are still this interceptor's to put back."""
    for module in modules:
        kind = vars(type(module))
        if kind.get(_INTERCEPTOR) is interceptor:
            module.__class__ = kind[_MARK]


def _outside(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that somebody wrote, under all that were generated."""
    while _MARK in vars(kind):
        kind = vars(kind)[_MARK]
    return kind


def _generate(original: type[nn.Module], interceptor: Interceptor, with_forward: bool) -> type[nn.Module]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = super(generated, self).__reduce_ex__(protocol)
        if type(self) is not generated or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        return (rebuild, (_outside(original),), *reduced[2:])

    names = {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    body = {**names, _MARK: original, _INTERCEPTOR: interceptor, "__reduce_ex__": __reduce_ex__}
    for name in ("__call__", "forward") if with_forward else ("__call__",):
        body[name] = _passing(getattr(original, name), interceptor)
    make: Any = type(original)
    generated: type[nn.Module] = make(original.__name__, (original,), body)
    return generated


def _passing(call_original: Callable[..., Any], interceptor: Interceptor) -> Callable[..., Any]:
    """A method that goes through the interceptor."""
    from torch._dynamo.decorators import skip  # late: it takes a second to import

    run_eagerly: Any = torch.compiler.disable(interceptor.run_eagerly)

    @skip  # rule 16; what it calls is closed by run_eagerly, which costs more, so only where somebody compiles
    @functools.wraps(call_original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = interceptor.run if get_eval_frame_callback() is None else run_eagerly
        return run(call_original, self, args, kwargs)

    vars(call)["_torchdynamo_disable_msg"] = _WHY_CLOSED
    return call
