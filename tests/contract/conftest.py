"""What the contract suite needs: models of every row, with LoRA or full training, and counters of its own."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import families
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import StepResult, run_step
from lowtide.runtime.resolve import ResolvedStack, resolve

SEED = 11


@dataclass
class Case:
    """One freshly built tiny model, its inputs, and the step that it makes without lowtide."""

    row: Family
    model: nn.Module
    inputs: dict[str, Any]
    plain: StepResult
    stacks: list[ResolvedStack] = field(init=False)

    def __post_init__(self) -> None:
        self.stacks = resolve(self.model, self.row.stacks)

    def step(self, model: nn.Module | None = None) -> StepResult:
        return run_step(model or self.model, self.inputs, SEED)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [block for stack in self.stacks for block in stack.blocks]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=families.all_families(), ids=lambda row: row.key)
def row(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """make_case(row, training="full"|"lora", variant=None) builds a case."""
    return _make_case


def _make_case(row: Family, training: str = "full", variant: str | None = None) -> Case:
    inputs = build_inputs(row.tiny, variant=row.variants[variant] if variant else None)
    return Case(row, _trainable(row, training), inputs, _plain(row.key, training, variant))


@functools.lru_cache(maxsize=8)
def _plain(key: str, training: str, variant: str | None) -> StepResult:
    row = families.find(key)
    inputs = build_inputs(row.tiny, variant=row.variants[variant] if variant else None)
    return run_step(_trainable(row, training), inputs, SEED)


def _trainable(row: Family, training: str) -> nn.Module:
    model = build_model(row, "tiny")
    return _with_lora(model, row) if training == "lora" else model


def _with_lora(model: nn.Module, row: Family) -> nn.Module:
    """LoRA on the projections of every softmax attention; adapters start away from zero, so that gradients do too."""
    names = [
        f"{block_name}.{name}"
        for stack in resolve(model, row.stacks)
        for block_name, block in stack.blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(f"{path}." for path in stack.row.attention))
    ]
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if hasattr(model, "add_adapter"):
            model.add_adapter(config)
        else:
            inject_adapter_in_model(config, model)
    return model


class ForwardCounter:
    """Counts how often the forward of chosen modules runs, on their classes: no hook, nothing on an instance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[int, str] = {}
        self.calls: Counter[str] = Counter()
        self._monkeypatch = monkeypatch
        self._classes: set[type[nn.Module]] = set()

    def watch(self, modules: list[tuple[str, nn.Module]]) -> None:
        self.names |= {id(module): name for name, module in modules}
        for kind in {type(module) for _, module in modules} - self._classes:
            self._classes.add(kind)
            self._monkeypatch.setattr(kind, "forward", self._counting(kind.forward))

    def _counting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(module))
            if name is not None:
                self.calls[name] += 1
            return forward(module, *args, **kwargs)

        return counted


@pytest.fixture
def forward_counter(monkeypatch: pytest.MonkeyPatch) -> ForwardCounter:
    return ForwardCounter(monkeypatch)


class Packed:
    """One tensor that saved-tensor hooks were given; alive as long as somebody holds it for backward."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class SavedBytes:
    """Counts the distinct storages that saved-tensor hooks were given and that are still held, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {self._key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._packed: weakref.WeakSet[Packed] = weakref.WeakSet()

    @property
    def total(self) -> int:
        storages = {self._key(packed.tensor): packed.tensor.untyped_storage().nbytes() for packed in self._packed}
        return sum(size for key, size in storages.items() if key not in self._weights)

    def pack(self, tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        self._packed.add(packed)
        return packed

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


@pytest.fixture
def saved_bytes() -> Callable[..., Any]:
    """A context manager over a model's step that counts what is saved."""

    @contextmanager
    def counting(model: nn.Module) -> Iterator[SavedBytes]:
        counter = SavedBytes(model)
        with saved_tensors_hooks(counter.pack, lambda packed: packed.tensor):
            yield counter

    return counting
