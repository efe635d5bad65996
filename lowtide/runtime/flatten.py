"""A call's arguments as a list of leaves and a structure from which the same arguments can be built again.

Containers are rebuilt as they were when the call began, so a list that the block appends to is no danger. Only those
are rebuilt whose state is known to the last bit: exact lists, tuples and dicts, named tuples, data classes that hold
their fields and nothing else. Any other container may have state of its own, and counts as an unknown object.
"""

import dataclasses
import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

# Rule 9: leaves are an allow-list. What is not on it may be changed by the block without anybody noticing.
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type}
)
_ATOM_BASES = (enum.Enum, nn.Module, type, int, float, str)

Structure = tuple[Callable[..., Any], Any]


class Leaves(list[torch.Tensor]):
    """The tensors of a call's arguments; ``generators``: the random generators among them."""

    generators: tuple[torch.Generator, ...] = ()


class OpaqueArgument(Exception):
    """An argument that may be mutated unseen, so a replay could not be trusted."""


def _leaf(index: int, leaves: list[Any]) -> Any:
    return leaves[index]


def _constant(value: Any, leaves: list[Any]) -> Any:
    return value


def _sequence(payload: tuple[Any, list[Structure]], leaves: list[Any]) -> Any:
    build, parts = payload
    return build([part[0](part[1], leaves) for part in parts])


def _mapping(payload: tuple[Any, list[tuple[Any, Structure]]], leaves: list[Any]) -> Any:
    build, items = payload
    return build({key: part[0](part[1], leaves) for key, part in items})


def _instance(payload: tuple[Any, list[tuple[str, bool, Structure]]], leaves: list[Any]) -> Any:
    """Past __init__ and __setattr__, which may do more than set a field."""
    kind, fields = payload
    new = kind.__new__(kind)
    for name, is_item, part in fields:
        value = part[0](part[1], leaves)
        object.__setattr__(new, name, value)
        if is_item:
            OrderedDict.__setitem__(new, name, value)
    return new


_NONE: Structure = (_constant, None)


def flatten(value: Any, leaves: Leaves, opaque: bool = False) -> Structure:
    """Append the tensors of ``value`` to ``leaves`` and return its structure.

    opaque: pass unknown objects through by identity instead of raising OpaqueArgument.
    """
    if value is None:
        return _NONE
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _leaf, len(leaves) - 1
    kind = type(value)
    if opaque and kind is types.FunctionType:
        return _flatten_function(value, leaves)
    if kind in _ATOMS:
        return _constant, value
    if kind is tuple or kind is list:
        return _sequence, (kind, [flatten(item, leaves, opaque) for item in value])
    if kind is dict:
        return _mapping, (dict, [(key, flatten(item, leaves, opaque)) for key, item in value.items()])
    if isinstance(value, (tuple, dict)) or hasattr(kind, "__dataclass_fields__"):
        structure = _flatten_record(value, kind, leaves, opaque)
        if structure is not None:
            return structure
    if isinstance(value, torch.Generator):
        leaves.generators = (*leaves.generators, value)
        return _constant, value
    if opaque or isinstance(value, _ATOM_BASES) or _is_plain_method(value):
        return _constant, value
    raise OpaqueArgument(f"{kind.__module__}.{kind.__qualname__}")


def _flatten_record(value: Any, kind: type, leaves: Leaves, opaque: bool) -> Structure | None:
    """A named tuple, ordered dict, data class or model output (those two in one); None where it is more than that."""
    state = getattr(value, "__dict__", _NOTHING)
    if issubclass(kind, tuple):
        build = _tuple_builder(kind)
        if state or build is None:
            return None
        return _sequence, (build, [flatten(item, leaves, opaque) for item in value])
    if kind is OrderedDict:
        if state:
            return None
        return _mapping, (kind, [(key, flatten(item, leaves, opaque)) for key, item in value.items()])
    layout = _layout(kind)
    if layout is None or not layout.is_all_of(value, state):
        return None
    items = value if layout.has_items else _NOTHING
    names = dict.fromkeys((*items, *layout.fields))  # items first, in their order
    fields = [(name, name in items, flatten(getattr(value, name), leaves, opaque)) for name in names]
    return _instance, (kind, fields)


def _flatten_function(function: types.FunctionType, leaves: Leaves) -> Structure:
    """Closure and defaults as they are now, so that a replay sees them so, and no cycle keeps the graph alive."""
    cells = function.__closure__ or ()
    if not cells and not function.__defaults__ and not function.__kwdefaults__:
        return _constant, function
    captured = [_snapshot(cell.cell_contents, leaves) if is_filled(cell) else None for cell in cells]
    defaults = _snapshot(function.__defaults__, leaves, deep=True)
    keywords = _snapshot(function.__kwdefaults__, leaves, deep=True)
    facts = (function.__code__, function.__globals__, function.__name__)
    return _function, (facts, captured, defaults, keywords)


def _function(payload: tuple[Any, list[Structure | None], Structure, Structure], leaves: list[Any]) -> Any:
    (code, names, name), captured, defaults, keywords = payload
    cells = tuple(types.CellType() if cell is None else types.CellType(rebuild(cell, leaves)) for cell in captured)
    function = types.FunctionType(code, names, name, rebuild(defaults, leaves), cells or None)
    function.__kwdefaults__ = rebuild(keywords, leaves)
    return function


def _snapshot(value: Any, leaves: Leaves, deep: bool = False) -> Structure:
    """Tensors become leaves, plain containers are copied one level down (two with ``deep``), the rest is as it is."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _leaf, len(leaves) - 1
    kind = type(value)
    inner = functools.partial(_snapshot if deep else _tensor_or_constant, leaves=leaves)
    if kind in (tuple, list):
        return _sequence, (kind, [inner(item) for item in value])
    if kind is dict:
        return _mapping, (dict, [(key, inner(item)) for key, item in value.items()])
    if isinstance(value, torch.Generator):
        leaves.generators = (*leaves.generators, value)
    return _constant, value


def _tensor_or_constant(value: Any, leaves: Leaves) -> Structure:
    return flatten(value, leaves) if isinstance(value, torch.Tensor) else (_constant, value)


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's cell has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


Arguments = tuple[list[Structure], list[tuple[str, Structure]]]


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], opaque: bool = False) -> tuple[Arguments, Leaves]:
    """Structure and tensors of a call's arguments."""
    leaves = Leaves()
    positional = [flatten(value, leaves, opaque) for value in args]
    return (positional, [(name, flatten(value, leaves, opaque)) for name, value in kwargs.items()]), leaves


def rebuild_call(arguments: Arguments, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that ``flatten_call`` described, over other tensors."""
    positional, named = arguments
    args = [build(payload, leaves) for build, payload in positional]
    return args, {name: build(payload, leaves) for name, (build, payload) in named}


def rebuild(structure: Structure, leaves: list[Any]) -> Any:
    """The value that ``flatten`` described, over other leaves."""
    return structure[0](structure[1], leaves)


def tensors_of(value: Any) -> Iterable[torch.Tensor]:
    """The tensors of a block's output, in a fixed order. Objects of unknown type hold none."""
    return (value,) if isinstance(value, torch.Tensor) else _tensors_inside(value)


def _tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


class _Layout(NamedTuple):
    """Where instances of a data class keep their state. has_items: they are ordered dicts, too."""

    fields: dict[str, None]
    slots: frozenset[str]
    has_items: bool

    def is_all_of(self, value: Any, state: dict[str, Any]) -> bool:
        """Whether ``value``, with the attributes ``state``, has every field and nothing else."""
        if state.keys() | self.slots != self.fields.keys() or not all(hasattr(value, name) for name in self.slots):
            return False
        return not self.has_items or all(state.get(name, state) is item for name, item in value.items())


_NOTHING: dict[str, Any] = {}


@functools.cache
def _layout(kind: type) -> _Layout | None:
    """None where instances may have state that is neither an attribute nor an item."""
    if not dataclasses.is_dataclass(kind) or kind.__new__ not in (object.__new__, OrderedDict.__new__):
        return None
    has_items = issubclass(kind, OrderedDict)
    if issubclass(kind, dict) and not has_items:
        return None
    slots = [name for base in kind.__mro__ for name in _names(base.__dict__.get("__slots__", ()))]
    fields = dict.fromkeys(field.name for field in dataclasses.fields(kind))
    return _Layout(fields, frozenset(slots) - {"__dict__", "__weakref__"}, has_items)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


@functools.cache
def _tuple_builder(kind: type) -> Callable[[list[Any]], Any] | None:
    """Of named tuples, past their __new__, and of the results of torch.max and its like."""
    if hasattr(kind, "_fields"):
        return functools.partial(tuple.__new__, kind)
    return kind if kind.__module__ == "torch.return_types" else None


def _is_plain_method(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return False
    return isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module)
