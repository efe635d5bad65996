"""Which arguments a replay builds anew, which it passes on as they are, and which it does not trust."""

import dataclasses
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import lowtide
from lowtide.runtime.flatten import Leaves, OpaqueArgument, flatten, rebuild, tensors_of
from tests.runtime.toys import Block, assert_equal, assert_same_as_plain, inputs, step


class Pair(NamedTuple):
    hidden: Any
    name: str = "pair"


class Doubling(namedtuple("Doubling", ["hidden"])):
    """Rebuilt through ``__new__`` it would double again."""

    __slots__ = ()

    def __new__(cls, hidden: Any) -> "Doubling":
        return super().__new__(cls, hidden * 2)


@dataclasses.dataclass
class Plain:
    hidden: Any
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Any
    name: str = "slotted"


@dataclasses.dataclass
class Unset:
    hidden: Any
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class SlottedUnset:
    hidden: Any
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Counting:
    """Keeps something beside its fields."""

    hidden: Any

    def __post_init__(self) -> None:
        self.reads = 0


class Scaled(list[Any]):
    scale = 1.0


class ScaledDict(dict[str, Any]):
    scale = 1.0


class ScaledTuple(NamedTuple("ScaledTuple", [("hidden", Any)])):
    """A named tuple with attributes of its own."""


@dataclasses.dataclass
class FieldList(list[Any]):
    hidden: Any


@dataclasses.dataclass(eq=False)
class Layer(nn.Module):
    hidden: Any

    def __post_init__(self) -> None:
        super().__init__()


@dataclasses.dataclass
class Template(ABC):
    """Its class, too, is an argument: of a metaclass other than ``type``."""

    hidden: Any

    @abstractmethod
    def run(self) -> Any: ...


def _tensor() -> torch.Tensor:
    return torch.arange(3.0)


def _attributed(value: Any) -> Any:
    value.scale = 3.0
    return value


REBUILT = {
    "list": lambda t: [t, 1],
    "tuple": lambda t: (t, (t, None)),
    "dict": lambda t: {"b": t, "a": [t]},
    "OrderedDict": lambda t: OrderedDict(b=t, a=1),
    "named tuple": lambda t: Pair(t),
    "named tuple with a __new__": Doubling,
    "result of torch.max": lambda t: torch.stack([t, t]).max(0),
    "data class": Plain,
    "frozen data class": Frozen,
    "data class with slots": Slotted,
    "diffusers output": lambda t: Transformer2DModelOutput(sample=t),
    "transformers output": lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t)),
}
OPAQUE = {
    "defaultdict": lambda t: defaultdict(list, hidden=[t]),
    "UserDict": lambda t: UserDict(hidden=t),
    "mapping proxy": lambda t: types.MappingProxyType({"hidden": t}),
    "list with an attribute": lambda t: _attributed(Scaled([t])),
    "dict with an attribute": lambda t: _attributed(ScaledDict(hidden=t)),
    "OrderedDict with an attribute": lambda t: _attributed(OrderedDict(hidden=t)),
    "named tuple with an attribute": lambda t: _attributed(ScaledTuple(t)),
    "data class with an unset field": Unset,
    "data class with slots and an unset field": SlottedUnset,
    "data class with more than its fields": Counting,
    "data class that is a list": FieldList,
    "model output with an attribute": lambda t: _attributed(Transformer2DModelOutput(sample=t)),
}


@pytest.mark.parametrize("make", REBUILT.values(), ids=REBUILT)
def test_what_is_known_to_the_last_bit_is_built_anew(make: Any) -> None:
    value = make(_tensor())
    leaves = Leaves()
    structure = flatten(value, leaves)
    assert len(leaves) == len(list(tensors_of(value))) > 0
    made = Plain.made
    again = rebuild(structure, [leaf + 10 for leaf in leaves])
    assert type(again) is type(value)
    assert again is not value
    assert Plain.made == made, "built past __init__"
    assert all(torch.equal(a, b + 10) for a, b in zip(tensors_of(again), tensors_of(value), strict=True))
    same = rebuild(structure, leaves)
    assert repr(same) == repr(value)
    assert getattr(same, "__dict__", {}).keys() == getattr(value, "__dict__", {}).keys()


@pytest.mark.parametrize("output", [Transformer2DModelOutput, BaseModelOutput])
def test_a_model_outputs_attributes_and_items_stay_one(output: Any) -> None:
    value = output(_tensor())
    leaves = Leaves()
    again = rebuild(flatten(value, leaves), leaves)
    assert list(again.keys()) == list(value.keys())
    assert all(again[key] is getattr(again, key) for key in again)
    assert again.to_tuple() == value.to_tuple()
    (key,) = again.keys()
    again[key] = None  # the library's own way of setting both
    assert getattr(again, key) is None


@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_any_other_container_is_opaque(make: Any) -> None:
    value = make(_tensor())
    with pytest.raises(OpaqueArgument, match=type(value).__name__):
        flatten(value, Leaves())
    leaves = Leaves()
    assert rebuild(flatten(value, leaves, opaque=True), leaves) is value
    assert not leaves


@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_a_container_inside_another_is_no_less_opaque(make: Any) -> None:
    with pytest.raises(OpaqueArgument):
        flatten({"inner": [make(_tensor())]}, Leaves())


def test_modules_and_classes_that_are_data_classes_are_passed_as_they_are() -> None:
    layer = Layer.__new__(Layer)
    nn.Module.__init__(layer)
    layer.hidden = 1
    for value in (layer, Template, Plain):
        assert rebuild(flatten(value, Leaves()), []) is value


def test_an_output_with_an_unset_field_is_read_as_far_as_it_goes() -> None:
    tensor = _tensor()
    assert [found is tensor for found in tensors_of((Unset(tensor), Counting(tensor)))] == [True, True]


class Reading(Block):
    """Works on what its second argument holds, and on the state that the argument has beside it."""

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:  # type: ignore[override]
        (shift,) = {id(t): t for t in _inside(given)}.values()
        return super().forward(x * getattr(given, "scale", 1.0) + shift)


class ReadingModel(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Reading() for _ in range(3))
        self.shift = nn.Parameter(torch.randn(16))
        self.make = make
        self.by_region = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.make(self.shift * 2)
        for block in self.blocks:
            x = lowtide.checkpoint(block, x, given) if self.by_region else block(x, given)
        return x


def _inside(value: Any) -> list[torch.Tensor]:
    """Tensors in attributes and items."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, (list, tuple)):
        parts += value
    elif hasattr(value, "items"):
        parts += [item for _, item in value.items()]
    elif isinstance(value, (Slotted, SlottedUnset)):
        parts.append(value.hidden)
    return [tensor for part in parts for tensor in _inside(part)]


@pytest.mark.parametrize("make", OPAQUE.values(), ids=OPAQUE)
def test_a_block_that_gets_an_opaque_container_is_kept(make: Any) -> None:
    model, x = ReadingModel(make), inputs()
    receipt = assert_same_as_plain(model, lambda: model(x), recomputed=0)
    assert [block.treatment for block in receipt.blocks] == ["kept"] * 3
    assert all(type(make(x)).__name__ in note.reason for note in receipt.fallbacks)


HOLD_WHAT_THEY_ARE_GIVEN = {
    name: make
    for name, make in {**REBUILT, **OPAQUE}.items()
    if name not in ("named tuple with a __new__", "result of torch.max")
}


@pytest.mark.parametrize("make", HOLD_WHAT_THEY_ARE_GIVEN.values(), ids=HOLD_WHAT_THEY_ARE_GIVEN)
def test_regions_take_every_container(make: Any) -> None:
    model, x = ReadingModel(make), inputs()
    plain = step(model, lambda: model(x))
    model.by_region = True
    assert_equal(plain, step(model, lambda: model(x)))
