"""Runs a forward on the meta device as if it ran in CPU memory, and answers when it asks for small values.

Tensors of the meta device have shapes and no values. Some forwards need values all the same: lengths that masks give,
positions, indices. So beside a tensor whose values follow from values that are known (the whole numbers and masks among
the inputs, and what the forward makes itself) its values are kept, as long as they are few. Rules:
1. Values belong to the storage, so views and changes in place need no care of their own.
2. An operator all of whose tensors are known runs on the values, too. Any other gives unknown values; what it changes
   in place is unknown from then on.
3. Who asks for values that are not known gets a ConfigError that names the operator.
4. Which experts a router chooses (``topk`` of what is unknown) is taken to be as even as it can be.
5. The forward is told that its tensors are in CPU memory: autocast knows no meta device, and a move from one to the
   other would be a copy.
6. What talks to other processes is refused, before it does: they would wait for what never comes, or answer.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowtide.errors import ConfigError
from lowtide.measure.shape_results import ShapeResults

MOST_WHOLE_NUMBERS = 2**22
"""Values of a larger tensor of whole numbers or booleans are not kept. Counted in elements of its storage."""
MOST_FLOATS = 2**12
"""The same for floating-point tensors: enough for what sizes and positions are computed through."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_BETWEEN_RANKS = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
"""Namespaces of operators that wait for other processes."""
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Shapes:
    """Context manager for a forward on the meta device: ``take`` its arguments in, and call it inside.

    An autocast that the forward enters casts nothing.
    """

    def __init__(self) -> None:
        self._values = _Values()
        self._modes = ExitStack()

    def __enter__(self) -> "Shapes":
        self._modes.enter_context(_Operators(self._values))
        self._modes.enter_context(_LooksLikeCpu(self._values))
        return self

    def __exit__(self, *details: Any) -> None:
        self._modes.close()

    def take(self, value: Any) -> Any:
        """The same with every tensor on the meta device, views of one storage with one storage there.

        The values of those that are in CPU memory are known; what the forward does to them, it does to a copy.
        """
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return tree_map_only(torch.Tensor, self._taken, value)

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        taken = self._values.stand_in(tensor, small_only=False)
        return taken.requires_grad_() if tensor.requires_grad and not taken.requires_grad else taken

    def stand_in(self, weight: torch.Tensor) -> torch.Tensor:
        """The tensor of the meta device that the forward sees of a weight or buffer."""
        return self._values.stand_in(weight)


class _Values:
    """Storages of the meta device whose values are known, each with a storage in CPU memory that has them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values, of the same shape and strides; None if they are not known."""
        if not tensor.is_meta:
            return tensor
        alive, storage = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        return None if alive is None or storage is None or alive.expired() else _like(tensor, storage)

    def read(self, tensor: torch.Tensor, reader: object) -> torch.Tensor:
        """The values. Raises ConfigError if they are not known."""
        values = self.of(tensor)
        if values is None:
            raise ConfigError(
                f"it reads values that no shape and no input of whole numbers decides: {reader} of a tensor of shape "
                f"{tuple(tensor.shape)}, {tensor.dtype}"
            )
        return values

    def learn(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """``tensor`` has these values, unless its storage is known already or large."""
        if _is_small(tensor) and self.of(tensor) is None:
            copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(values)
            self._enter(tensor.untyped_storage(), copy.untyped_storage())

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def stand_in(self, tensor: torch.Tensor, *, small_only: bool = True) -> torch.Tensor:
        """The tensor of the meta device that stands for this one, with its values: of a large one on demand only."""
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        alive, meta = self._stand_ins.get(storage._cdata, (None, None))
        if alive is None or meta is None or alive.expired():
            meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META).untyped_storage()
            self._stand_ins[storage._cdata] = StorageWeakRef(storage), meta
            if _is_small(tensor) or not small_only:
                self._enter(meta, storage.clone() if storage.device == _CPU else storage.cpu())
        return _like(tensor, meta)

    def _enter(self, storage: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        self._known[storage._cdata] = StorageWeakRef(storage), values


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The view of ``storage`` that ``tensor`` is of its own."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    view = view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = torch.ops.aten._neg_view(view) if tensor.is_neg() else view
    return view.conj() if tensor.is_conj() else view


def _is_small(tensor: torch.Tensor) -> bool:
    most = MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else MOST_WHOLE_NUMBERS
    return tensor.untyped_storage().nbytes() <= most * tensor.element_size()


class _Facts(NamedTuple):
    """What the schema of an operator says. writes: places and names of the arguments that it changes."""

    takes_device: bool
    writes: tuple[tuple[int, str], ...]
    gives_views: bool
    reads_values: bool
    is_random: bool


@functools.cache
def _facts(func: Any) -> _Facts:
    arguments = list(enumerate(func._schema.arguments))
    return _Facts(
        takes_device=any(a.name == "device" for _, a in arguments),
        writes=tuple((place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        gives_views=any(result.alias_info is not None for result in func._schema.returns),
        reads_values=bool(_READING & set(func.tags)),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
    )


class _Operators(TorchDispatchMode):
    """Runs every operator on shapes, and on values where all are known (rules 1 to 4)."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values
        self._results = ShapeResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard doubles the cost of an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # what runs here is no part of the forward
            return self._run(func, _facts(func), args, dict(kwargs or {}))

    def _run(self, func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in _BETWEEN_RANKS:  # rule 6
            raise ConfigError(
                f"its forward exchanges tensors with other ranks ({func}), which have to do the same at the same time: "
                "give all of them one saved plan (attach(schedule=…))"
            )
        if not all(tensor.is_meta for tensor in _tensors((args, kwargs))):
            stand_in = functools.partial(self._stand_in, func, facts)
            args, kwargs = _mapped(stand_in, args), _mapped(stand_in, kwargs)
        if func is _aten.masked_select.default:
            tensor, mask = torch.broadcast_tensors(*args)
            func, args = _aten.index.Tensor, (tensor, [mask])
        if func is _aten.index.Tensor:
            args = (args[0], [position for index in args[1] for position in self._positions(index)])
        elif facts.reads_values:
            return self._read(func, facts, args, kwargs)
        placed = kwargs | {"device": _META} if facts.takes_device else kwargs
        changes = facts.writes or facts.gives_views
        output = func(*args, **placed) if changes else self._results.of(func, args, placed)
        if facts.writes:
            if not self._is_known(facts, args, kwargs):
                self._forget(facts, args, kwargs)
            else:
                self._on_values(func, facts, args, kwargs)
        elif facts.gives_views:
            pass  # rule 1
        elif all(map(_is_small, _tensors(output))) and self._is_known(facts, args, kwargs):
            self._learn(output, self._on_values(func, facts, args, kwargs))
        elif func is _aten.topk.default:
            self._values.learn(output[1], _evenly(args[0], output[1], *args[2:3]))
        return output

    def _is_known(self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not facts.is_random and all(self._values.of(tensor) is not None for tensor in _tensors((args, kwargs)))

    def _forget(self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, name in facts.writes:
            for tensor in _tensors(args[place] if place < len(args) else kwargs.get(name)):
                self._values.forget(tensor)

    def _stand_in(self, func: Any, facts: _Facts, tensor: torch.Tensor) -> torch.Tensor:
        """A number among tensors stays what it is: it decides less about the dtype of a result than a tensor."""
        is_number = tensor.dim() == 0 and not facts.writes and func is not _aten.lift_fresh.default
        return tensor if is_number else self._values.stand_in(tensor)

    def _on_values(self, func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = functools.partial(self._values.read, reader=func)
        args, kwargs = _mapped(read, args), _mapped(read, kwargs)
        return func(*args, **(kwargs | {"device": _CPU} if facts.takes_device else kwargs))

    def _read(self, func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of an operator whose result, or its shape, depends on values."""
        result = self._on_values(func, facts, args, kwargs)
        shapes = _mapped(lambda values: torch.empty_like(values, device=_META), result)
        self._learn(shapes, result)
        return shapes

    def _learn(self, shapes: Any, values: Any) -> None:
        for tensor, known in zip(_tensors(shapes), _tensors(values), strict=True):
            self._values.learn(tensor, known)

    def _positions(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """What a mask among indices stands for: the positions that it picks, one tensor a dimension."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        picked = self._values.read(index, "the positions").nonzero().unbind(1)
        shapes = [torch.empty_like(positions, device=_META) for positions in picked]
        self._learn(shapes, picked)
        return list(shapes)


class _LooksLikeCpu(TorchFunctionMode):
    """Rule 5. Also lets Python see known values, and makes tensors from Python's numbers with their values."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DEVICE:
            return _CPU
        if func in _TO_PYTHON:
            with torch._C._DisableTorchDispatch():
                return func(self._values.read(args[0], func.__name__), *args[1:], **kwargs)
        if func is torch.Tensor.cpu:
            return args[0]
        if func is torch.Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": None})
        if func in _FROM_PYTHON:
            return func(*args, **(kwargs | {"device": None}))
        if _is_cpu(kwargs.get("device")):
            kwargs["device"] = _META
        if func is torch.Tensor.to:
            args = tuple(_META if _is_cpu(value) else value for value in args)
        return func(*args, **kwargs)


_DEVICE = frozenset({torch.Tensor.device.__get__})  # pyright: ignore[reportAttributeAccessIssue]
_TO_PYTHON = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def _is_cpu(value: Any) -> bool:
    return value == _CPU if isinstance(value, torch.device) else isinstance(value, str) and value == "cpu"


def _evenly(scores: torch.Tensor, chosen: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Indices of the shape of ``chosen`` along a dimension of ``scores``: every one as often as any other (rule 4)."""
    last = chosen.transpose(dim, -1)
    return (torch.arange(chosen.numel()) % scores.shape[dim]).view(last.shape).transpose(dim, -1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return value
