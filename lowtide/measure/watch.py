"""How sure it is that what structure shows of a model is right: one forward is watched, and compared with it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.attention_backend import entry_points
from lowtide.errors import ConfigError
from lowtide.families import Build
from lowtide.families.inputs import randn
from lowtide.measure.inputs import build_inputs
from lowtide.measure.shapes import Shapes
from lowtide.runtime.entry_points import EntryPoint, Kernel, Watching, unwatched
from lowtide.runtime.flatten import tensors_of
from lowtide.runtime.resolve import ResolvedStack

DECLARED, CONFIRMED, STRUCTURE, DOUBTFUL = "row", "structure and forward", "structure", "doubtful"
CERTAINTIES = (DECLARED, CONFIRMED, STRUCTURE, DOUBTFUL)
_META = ". The model was on the meta device: a forward that depends on values needs it on the CPU (`--device cpu`)"


@dataclass(frozen=True)
class Evidence:
    """How sure something is (one of CERTAINTIES) and why, in sentences.

    row: a family declares it. structure: names, classes and lists of modules show it, and no forward was watched.
    structure and forward: a forward showed it, too. doubtful: a forward showed something else.
    """

    certainty: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Missed:
    """Modules of one class that were called one after another and stand in no stack."""

    block_class: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class StackEvidence:
    """stack: of the blocks and their order. sides: by path in a block, of feed-forward and attention modules."""

    stack: Evidence
    sides: dict[str, Evidence]


@dataclass(frozen=True)
class Watched:
    """What one forward showed: evidence by stack name, and what structure did not find."""

    stacks: dict[str, StackEvidence]
    missed: tuple[Missed, ...] = ()


def without_forward(stack: ResolvedStack) -> StackEvidence:
    """What is known of a stack before any forward."""
    if not stack.found:
        declared = Evidence(DECLARED)
        return StackEvidence(declared, dict.fromkeys(_sides(stack), declared))
    kinds = ", ".join(dict.fromkeys(type(block).__name__ for _, block in stack.blocks))
    why = f"{len(stack.blocks)} composite modules of like kind ({kinds}) stand together"
    by_name = Evidence(STRUCTURE, ("its name says so",))
    return StackEvidence(Evidence(STRUCTURE, (why,)), dict.fromkeys(_sides(stack), by_name))


def inputs_of(shapes: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a forward: a list of whole numbers is the shape of a tensor in the model's dtype, everything
    else what ``families.inputs`` makes of it (``{"gen": "full", "shape": [1], "dtype": "int64", "value": 1}``)."""
    parameter = next(model.parameters())
    nodes = {name: randn(*value) if _is_shape(value) else value for name, value in shapes.items()}
    return build_inputs(Build({}, {}, {}, nodes), parameter.dtype, device=parameter.device)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in value)


def watch(model: nn.Module, stacks: Sequence[ResolvedStack], inputs: Mapping[str, Any]) -> Watched:
    """One forward without gradients, compared with the stacks that structure showed. The model is left as it was.

    On the meta device it takes no memory. Raises ConfigError where the forward fails.
    """
    seen = _Seen(model, stacks)
    with ExitStack() as watching, torch.no_grad():
        if _is_bare(model):
            shapes = Shapes()
            inputs = shapes.take(inputs)
            watching.enter_context(shapes)
        watching.enter_context(Watching(entry_points(), seen))
        for handle in seen.hooks():
            watching.callback(handle.remove)
        try:
            model(**inputs)
        except (ConfigError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            hint = _META if _is_bare(model) and isinstance(error, (ConfigError, RuntimeError)) else ""
            raise ConfigError(
                f"the forward of {type(model).__name__} failed with these inputs ({', '.join(inputs)}): "
                f"{str(error).partition('. ')[0]}{hint}"
            ) from error
    return Watched({stack.name: seen.evidence(stack) for stack in stacks}, tuple(seen.missed()))


@dataclass
class _Block:
    """What was seen of one block.

    handed_on: it got what the block before returned. beside: it got no tensor that the block before had not got.
    """

    calls: int = 0
    handed_on: bool = False
    beside: bool = False
    given: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


class _Seen:
    """Hooks on everything that may be a block or a side of one, and what they saw."""

    def __init__(self, model: nn.Module, stacks: Sequence[ResolvedStack]) -> None:
        self.model = model
        self.stacks = stacks
        self.order: list[tuple[str, int]] = []
        self.called: dict[nn.Module, int] = {}
        self.with_kernel: set[nn.Module] = set()
        self._blocks = {block: _Block() for stack in stacks for _, block in stack.blocks}
        self._active: list[nn.Module] = []
        self._others = dict(_others(model, set(self._blocks)))
        self._made: dict[nn.Module, list[torch.Tensor]] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []

    def hooks(self) -> Iterator[Any]:
        for module in self.model.modules():
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, always_call=True)
        for stack in self.stacks:
            for index, (_, block) in enumerate(stack.blocks):
                yield block.register_forward_pre_hook(self._enter_block(stack, index), with_kwargs=True)

    def call(self, entry: EntryPoint, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attention kernel: it belongs to every module that is running."""
        self.with_kernel.update(self._active)
        return unwatched(kernel, args, kwargs)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._active.append(module)
        self.called[module] = self.called.get(module, 0) + 1
        if module in self._others:
            given = list(tensors_of((args, kwargs)))
            for other, outputs in self._made.items():
                if other is not module and type(other) is type(module) and _share(outputs, given):
                    self._pairs.append((other, module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._active.pop()
        if module in self._blocks:
            self._blocks[module].outputs = list(tensors_of(output))
        elif module in self._others:
            self._made[module] = list(tensors_of(output))

    def _enter_block(self, stack: ResolvedStack, index: int) -> Any:
        before = self._blocks[stack.blocks[index - 1][1]] if index else _Block()

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            block = self._blocks[module]
            block.calls += 1
            block.given = list(tensors_of((args, kwargs)))
            block.handed_on |= _share(before.outputs, block.given)
            block.beside |= {id(tensor) for tensor in block.given} <= {id(tensor) for tensor in before.given}
            before.given, before.outputs = [], []
            self.order.append((stack.name, index))

        return enter

    def evidence(self, stack: ResolvedStack) -> StackEvidence:
        blocks = [self._blocks[block] for _, block in stack.blocks]
        doubts = list(self._doubts(stack, blocks))
        why = doubts or [*self._calls(stack, blocks), _handing_on(blocks)]
        certainty = DOUBTFUL if doubts else CONFIRMED
        return StackEvidence(Evidence(certainty, tuple(why)), {path: self._side(stack, path) for path in _sides(stack)})

    def _doubts(self, stack: ResolvedStack, blocks: Sequence[_Block]) -> Iterator[str]:
        idle = [name for (name, _), block in zip(stack.blocks, blocks, strict=True) if not block.calls]
        if idle:
            yield f"{len(idle)} of {len(blocks)} blocks were not called ({idle[0]} the first)"
        first = list(dict.fromkeys(index for name, index in self.order if name == stack.name))
        if first != sorted(first):
            yield f"its blocks were called in another order: {', '.join(map(str, first))}"
        if all(block.beside and not block.handed_on for block in blocks[1:]):
            yield "its blocks were given the same tensors: they run beside one another, not one after another"

    def _calls(self, stack: ResolvedStack, blocks: Sequence[_Block]) -> Iterator[str]:
        counts = {block.calls for block in blocks}
        often = "once each" if counts == {1} else f"{min(counts)} to {max(counts)} times" if len(counts) > 1 else ""
        yield f"its {len(blocks)} blocks were called {often or f'{counts.pop()} times each'}, in this order"
        names = [name for name, _ in self.order]
        span = names[names.index(stack.name) : len(names) - names[::-1].index(stack.name)]
        others = dict.fromkeys(name for name in span if name != stack.name)
        if others:
            yield f"in turn with {', '.join(others)}"

    def _side(self, stack: ResolvedStack, path: str) -> Evidence:
        found = dict(_modules_at(stack, path))
        idle = [name for name, module in found.items() if not self.called.get(module)]
        if len(idle) == len(found):
            return Evidence(DOUBTFUL, ("it was not called",))
        if path in stack.row.attention:
            without = [name for name, module in found.items() if module not in self.with_kernel]
            if without:
                where = "" if len(without) == len(found) else f" of {len(without)} of {len(found)} blocks"
                return Evidence(DOUBTFUL, (f"no attention kernel was called in it{where}: linear attention, perhaps",))
            return Evidence(CONFIRMED, ("an attention kernel was called in it",))
        return Evidence(CONFIRMED, ("it was called" + (f" in {len(found) - len(idle)} blocks" if idle else ""),))

    def missed(self) -> Iterator[Missed]:
        """Runs of modules, each of which was handed what the one before returned; of nested runs the outer one."""
        runs: list[list[nn.Module]] = []
        for first, second in self._pairs:
            run = next((run for run in runs if run[-1] is first), None)
            if run is None:
                runs.append([first, second])
            elif second not in run:
                run.append(second)
        inner = {part for run in runs for module in run for part in module.modules() if part is not module}
        for run in runs:
            if run[0] not in inner:
                yield Missed(type(run[0]).__name__, tuple(self._others[module] for module in run))


def _is_bare(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _handing_on(blocks: Sequence[_Block]) -> str:
    handed = sum(block.handed_on for block in blocks)
    pairs = len(blocks) - 1
    if handed == pairs:
        return "each was handed what the one before returned"
    return f"{pairs - handed} of {pairs} were handed what the model made in between: segments end there"


def _share(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether one of ``given`` is one of ``outputs``, or a part of it."""
    made = {id(tensor) for tensor in outputs}
    return any(id(tensor) in made or id(tensor._base) in made for tensor in given)


def _sides(stack: ResolvedStack) -> tuple[str, ...]:
    chains = [path for _, block in stack.blocks for chain in stack.chains(block) for path, _ in chain]
    return tuple(dict.fromkeys([*chains, *(path for path in stack.row.attention if _modules_at(stack, path))]))


def _modules_at(stack: ResolvedStack, path: str) -> list[tuple[str, nn.Module]]:
    found = [(name, dict(block.named_modules()).get(path)) for name, block in stack.blocks]
    return [(name, module) for name, module in found if module is not None]


def _others(model: nn.Module, blocks: set[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Modules of more than one part that are not a block, inside one, or around one."""
    inside = {part for block in blocks for part in block.modules()}
    for name, module in model.named_modules():
        parts = list(module.modules())
        own_class = not type(module).__module__.startswith("torch.")
        if own_class and len(parts) > 2 and module not in inside and not blocks.intersection(parts):
            yield module, name
