"""``lowtide.attach``: from the user's settings to a model whose blocks are recomputed in backward."""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from lowtide import families
from lowtide.attention_backend import providers
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.families.row import Stack
from lowtide.plan.schedule import FFN, KEPT, WHOLE, Schedule, StackSchedule
from lowtide.runtime.ledger import BlockRecord, Ledger
from lowtide.runtime.receipt import BlockReceipt, Note, Receipt
from lowtide.runtime.resolve import ResolvedStack, child, resolve
from lowtide.runtime.swap import intercept, release
from lowtide.runtime.tracer import Tracer, Unit


class Handle:
    """What ``attach`` returns: the receipt of the last step, and the way back. Also a context manager."""

    def __init__(self, model: nn.Module, stacks: list[ResolvedStack], schedule: Schedule, config: CheckpointConfig):
        self.stacks = stacks
        self.schedule = schedule
        self.config = config
        self._ledger = Ledger(model)
        units = list(_units(stacks, schedule, self._ledger, config.scope))
        self._modules = {name: module for name, module, _ in units}
        self._tracer = Tracer([(module, unit) for _, module, unit in units], self._ledger, providers())
        intercept(self._modules.items(), self._tracer)

    def receipt(self) -> Receipt:
        """What ran in the last step. Valid once its backward is done."""
        ledger = self._ledger
        blocks = tuple(self._block(number, record) for number, record in enumerate(ledger.records))
        return Receipt(
            blocks=blocks,
            inert=tuple(_inert(self.config, blocks)),
            fallbacks=tuple(Note(name, reason) for name, reason in ledger.fallbacks.items()),
            warnings=tuple(self._warnings()),
        )

    def _block(self, number: int, record: BlockRecord) -> BlockReceipt:
        storages = self._ledger.storages
        return BlockReceipt(
            name=record.name,
            stack=record.stack,
            index=record.index,
            treatment=record.treatment,
            segment=record.segment,
            reason=record.reason if record.forward_calls else "not called",
            recompute_calls=record.recompute_calls,
            kept_bytes=storages.held_bytes(number) if storages is not None else 0,
            cpu_bytes=0,
            recomputed_bytes=storages.dropped_bytes(number) if storages is not None else 0,
        )

    def _warnings(self) -> Iterator[str]:
        if not any(record.forward_calls for record in self._ledger.records):  # rule 22
            yield (
                "attached, but no block has been called with gradients on since: a compiled or replaced copy of the "
                "model may be running, or the forward ran under no_grad"
            )
        if any(module.__dict__.get("gradient_checkpointing") is True for module in self._model_modules()):
            yield (
                "the model's own gradient checkpointing is on as well, so blocks are recomputed by both: call "
                "`model.disable_gradient_checkpointing()`"
            )
        compiled = [record.name for record in self._ledger.records if record.in_compiled_code]
        if compiled:  # rule 16
            yield (
                f"{len(compiled)} blocks ({compiled[0]} the first) were called from code under torch.compile, and what "
                "is recomputed of them ran eagerly. Use whole blocks and compile those: `block.compile()`, or "
                "`model.compile_repeated_blocks()` in diffusers"
            )
        exchanged = self._exchanged()
        if exchanged:
            name, module = exchanged[0]
            yield (
                f"{len(exchanged)} modules ({name} the first, now of class {type(module).__name__}) have been wrapped "
                "or replaced since attach, and are not treated as a whole. Attach after the last change of the model"
            )

    def _exchanged(self) -> list[tuple[str, nn.Module | None]]:
        """What stands now in the places of intercepted modules that are no longer there."""
        root = self._ledger.model()
        if root is None:
            return []
        now = [(name, child(root, name)) for name in self._modules]
        return [(name, module) for name, module in now if module is not self._modules[name]]

    def _model_modules(self) -> Iterator[nn.Module]:
        model = self._ledger.model()
        return iter(()) if model is None else model.modules()

    def detach(self) -> None:
        """Restore the model exactly. Graphs that are still alive can be run backward."""
        release(self._modules.values())
        self._tracer.active = False

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(
    model: nn.Module,
    *,
    backend: str | None = "torch",
    interval: int | None = None,
    segment_stride: int | None = None,
    family: str | None = None,
    schedule: Schedule | None = None,
    **unknown: Any,
) -> Handle:
    """Recompute activations of ``model``'s blocks in backward, with exactly the gradients of a plain run.

    model: any module that has block stacks: a diffusers or transformers model, also inside DDP, PEFT or torch.compile
        wrappers. Known classes use their family's row; for others the stacks are found by structure.
    backend: ``"torch"`` whole blocks, ``"torch-ffn"`` feed-forward sides, None nothing.
    interval, segment_stride: see docs/controls.md.
    family: a key, title or alias of ``lowtide families``; default: by the model's class.
    schedule: an explicit treatment of every block, instead of backend, interval and segment_stride.

    Raises ConfigError for a wrong value or a model that is attached already, UnsupportedError where the model cannot
    run the scope. Activation checkpointing with non-reentrant semantics: Chen et al., arXiv:1604.06174.
    """
    if unknown:
        CheckpointConfig(**unknown)  # raises the error that names the nearest key
        raise ConfigError(f"attach() does not take {', '.join(unknown)}")
    _check_own_switch(model)
    root, rows = _rows_for(model, family)
    stacks = resolve(root, rows)
    if schedule is not None:
        _check_exclusive(backend, interval, segment_stride)
        config = CheckpointConfig(gradient_checkpointing=False)
        _check_schedule(schedule, stacks)
    else:
        config = CheckpointConfig.for_attach(backend, interval, segment_stride)
        schedule = schedule_for(stacks, config, type(root).__name__)
    return Handle(root, stacks, schedule, config)


def schedule_for(stacks: list[ResolvedStack], config: CheckpointConfig, model: str = "this model") -> Schedule:
    """The treatment that the controls ask for, for every block of the resolved stacks."""
    depths = {stack.name: len(stack.blocks) for stack in stacks}
    has_feed_forward = {stack.name: stack.has_feed_forward for stack in stacks}
    return config.schedule_for(depths, has_feed_forward, model=model)


def _rows_for(model: nn.Module, family: str | None) -> tuple[nn.Module, tuple[Stack, ...] | None]:
    """The module whose stacks are meant (wrappers peeled off by looking inside) and its rows, if a family knows it."""
    if family is not None:
        row = families.find(family)
        return _inner(model, row.class_name) or model, row.stacks
    for module in model.modules():
        for kind in type(module).__mro__:
            known = families.by_class(kind.__name__)
            if known is not None:
                return module, known.stacks
    return model, None


def _inner(model: nn.Module, class_name: str) -> nn.Module | None:
    return next((m for m in model.modules() if class_name in {kind.__name__ for kind in type(m).__mro__}), None)


def _check_own_switch(model: nn.Module) -> None:
    for name, module in model.named_modules():
        by_hand = module.__dict__.get("_gradient_checkpointing_func", module) is None
        if by_hand and module.__dict__.get("gradient_checkpointing") is True:
            raise ConfigError(
                f"{name or type(module).__name__}.gradient_checkpointing was set to True by hand, so the model's own "
                "forward would fail. Set it to False; lowtide does not need it."
            )


def _check_exclusive(backend: str | None, interval: int | None, segment_stride: int | None) -> None:
    if backend not in (None, "torch") or interval is not None or segment_stride is not None:
        raise ConfigError("`schedule` is complete by itself: leave backend, interval and segment_stride out.")


def _check_schedule(schedule: Schedule, stacks: list[ResolvedStack]) -> None:
    depths = {stack.name: len(stack.blocks) for stack in stacks}
    given = {name: stack.depth for name, stack in schedule.stacks.items()}
    if given != depths:
        raise ConfigError(f"the schedule is for stacks {given}, but this model has {depths}")


def _units(
    stacks: Sequence[ResolvedStack], schedule: Schedule, ledger: Ledger, scope: str | None
) -> Iterator[tuple[str, nn.Module, Unit]]:
    for stack in stacks:
        plan = schedule.stacks[stack.name]
        for index, (name, block) in enumerate(stack.blocks):
            treatment = plan.treatments[index]
            chains = stack.chains(block) if treatment == FFN else []
            bare = FFN in (treatment, scope) and not stack.chains(block)
            reason = "no feed-forward" if bare else None
            record = ledger.add(name, stack.name, index, KEPT if bare else treatment, reason)
            yield name, block, _block_unit(block, record, stack, plan, index)
            for number, chain in enumerate(chains):
                yield from _chain_units(name, record, number, chain)


def _chain_units(
    block: str, record: BlockRecord, number: int, chain: list[tuple[str, nn.Module]]
) -> Iterator[tuple[str, nn.Module, Unit]]:
    for place, (path, module) in enumerate(chain):
        counts = number == place == 0  # both streams of a block are one recomputation of its feed-forward side
        unit = Unit(weakref.ref(module), record, FFN, (block, number), position=place, counts=counts)
        unit.width, unit.last = len(chain), len(chain) - 1
        yield f"{block}.{path}", module, unit


def _block_unit(block: nn.Module, record: BlockRecord, stack: ResolvedStack, plan: StackSchedule, index: int) -> Unit:
    number = plan.segments[index]
    if plan.treatments[index] != WHOLE or number is None:
        return Unit(weakref.ref(block), record, KEPT, stack.name)
    width = len(plan.blocks_of(number))
    carry = _carry_places(block, stack.row.carry)
    return Unit(weakref.ref(block), record, WHOLE, stack.name, number, index, width, carry)


def _carry_places(block: nn.Module, names: Sequence[str]) -> tuple[tuple[int, str], ...]:
    if not names:
        return ()
    parameters = list(inspect.signature(block.forward).parameters)
    return tuple((parameters.index(name), name) for name in names if name in parameters)


def _inert(config: CheckpointConfig, blocks: Sequence[BlockReceipt]) -> Iterator[Note]:
    """Options that were honoured and changed no treatment in this step."""
    whole = [block for block in blocks if block.treatment == WHOLE and block.segment is not None]
    interval, stride = config.interval or 1, config.segment_stride
    if interval > 1 and whole and len({block.segment for block in whole}) == len(whole):
        yield Note("interval", "no segment held more than one block in this step")
    if stride is not None and not any(block.treatment == KEPT for block in blocks):
        yield Note("segment_stride", "no block was left between two segments")
    treated = [block for block in blocks if block.treatment != KEPT]
    if treated and not any(block.recompute_calls for block in treated):
        yield Note("backend", "nothing was recomputed in this step: no backward yet, or no block needed a gradient")
