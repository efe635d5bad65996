"""From controls, or a schedule, to a model whose blocks are recomputed in backward: see ``attaching.attach``."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from torch import nn

from lowtide import families
from lowtide.attention_backend import entry_points, providers
from lowtide.checkpoint_wrappers import wrapped
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.families.row import Family, Stack
from lowtide.inert import ignored, inert
from lowtide.plan.answer import Plan
from lowtide.plan.schedule import ATTENTION, FFN, KEPT, MOVES, SELECTIVE, Schedule
from lowtide.runtime.in_turn import InTurn
from lowtide.runtime.ledger import BlockRecord, Ledger
from lowtide.runtime.link import accelerator_or_simulated
from lowtide.runtime.receipt import BlockReceipt, Copies, Note, Receipt
from lowtide.runtime.resolve import ResolvedStack, child, resolve
from lowtide.runtime.store import Store
from lowtide.runtime.swap import intercept, release
from lowtide.runtime.tracer import Tracer
from lowtide.runtime.unit import NO_ATTENTION, lacks_attention, movable, moving, units_of
from lowtide.warn import warn_caller

RUNS_LAST = "runs last, stays on the device"
"""Why a block of which something would wait in CPU memory keeps it."""
NOT_CALLED = "not called"
"""Why a block was not treated: no step came by it."""


OWN_IS_ON = (
    "the model's own gradient checkpointing is on as well, so blocks are recomputed by both: call "
    "`model.disable_gradient_checkpointing()`"
)


class Attachment(ABC):
    """What is detached at the end of a ``with``."""

    @abstractmethod
    def detach(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


class Handle(Attachment):
    """What ``attach`` returns: the receipt of the last step, and the way back. Also a context manager.

    plan: the saved plan that was attached by its file; else None. settled: True. Both are there for loops that run with
    ``auto`` as well: see ``AutoHandle``.
    """

    settled = True

    def __init__(
        self,
        model: nn.Module,
        stacks: list[ResolvedStack],
        schedule: Schedule,
        config: CheckpointConfig,
        in_turn: InTurn | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.stacks = stacks
        self.plan = plan
        wanted, schedule = schedule, without_last_round_trip(schedule, [stack.name for stack in stacks])
        self.schedule = schedule
        self.config = config
        self._stay = held_back(stacks, wanted, schedule)
        self._moving, self._without_attention = _moving(stacks, schedule)
        self._ignored = tuple(ignored(config, depths_of(stacks, config)))
        self._store = _store(model, schedule, config, in_turn)
        self._ledger = Ledger(model, self._store)
        units = list(units_of(stacks, schedule, self._ledger, config.scope))
        self._modules = {name: module for name, module, _ in units}
        intercepted = [(module, unit) for _, module, unit in units]
        depth = None if in_turn is None else in_turn.depth
        self._tracer = Tracer(intercepted, self._ledger, providers(), self._store, entry_points(), depth)
        self._interceptor = self._tracer if in_turn is None else in_turn.routes.to(self._tracer)
        intercept(self._modules.items(), self._interceptor)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.schedule.in_short}{'' if self._tracer.active else '; detached'}>"

    def receipt(self) -> Receipt:
        """What ran in the last step. Valid once its backward is done."""
        ledger = self._ledger
        blocks = tuple(self._block(number, record) for number, record in enumerate(ledger.records))
        copies = self._store.copies() if self._store is not None else Copies()
        never = {note.subject for note in self._ignored}
        keeps = ledger.storages is None or ledger.storages.kernels_kept
        return Receipt(
            blocks=blocks,
            copies=copies,
            inert=tuple(note for note in inert(self.config, blocks, copies, keeps) if note.subject not in never),
            ignored=self._ignored,
            fallbacks=tuple(Note(name, reason) for name, reason in ledger.fallbacks.items()),
            warnings=tuple(self._warnings()),
        )

    def passing_bytes(self) -> int:
        """Of what is on the device now on its way to CPU memory, or back from there before it is needed."""
        return self._store.passing_bytes if self._store is not None else 0

    def _block(self, number: int, record: BlockRecord) -> BlockReceipt:
        storages = self._ledger.storages
        return BlockReceipt(
            name=record.name,
            stack=record.stack,
            index=record.index,
            treatment=self._treatment(record),
            segment=record.segment,
            reason=self._reason(record),
            recompute_calls=record.recompute_calls,
            kept_bytes=storages.held_bytes(number) if storages is not None else 0,
            cpu_bytes=storages.moved_bytes(number) if storages is not None else 0,
            recomputed_bytes=storages.dropped_bytes(number) if storages is not None else 0,
        )

    def _reason(self, record: BlockRecord) -> str | None:
        if not record.forward_calls:
            return NOT_CALLED
        if record.treatment == KEPT and record.name in self._without_attention:
            return record.reason or NO_ATTENTION
        return record.reason or (RUNS_LAST if record.name in self._stay else None)

    def _treatment(self, record: BlockRecord) -> str:
        moves = self._moving[record.name] & MOVES[record.treatment]
        as_planned = record.treatment == record.planned
        return record.treatment + "+offload" if moves and as_planned else record.treatment

    def _warnings(self) -> Iterator[str]:
        if not any(record.forward_calls for record in self._ledger.records):  # rule 22
            yield (
                "attached, but no block has been called with gradients on since: a compiled or replaced copy of the "
                "model may be running, or the forward ran under no_grad"
            )
        if has_own_on(self._model_modules()):
            yield OWN_IS_ON
        model = self._ledger.model()
        paths = wrapped(model, self.stacks) if model is not None else []
        if paths:
            both = any(record.treatment != KEPT for record in self._ledger.records)
            told = (
                "blocks are recomputed by both: attach after they are wrapped" if both else "this handle does nothing"
            )
            first = paths[0] or type(model).__name__
            yield f"{len(paths)} parts of the model ({first} the first) are in torch's CheckpointWrapper, so {told}"
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
        if self._tracer.active:  # else these classes may be those of a handle that came after
            release(self._modules.values(), self._interceptor)
        self._tracer.active = False
        if self._store is not None:
            self._store.close()


def attach_as(
    model: nn.Module,
    config: CheckpointConfig,
    schedule: Schedule | None = None,
    family: str | None = None,
    in_turn: InTurn | None = None,
    plan: Plan | None = None,
) -> Handle:
    """Attach as the controls say, or as a schedule does; then they say only how memory is moved.

    in_turn: of a model to which several handles are attached in turn. plan: whose schedule it is, if it is a plan's.

    Raises ConfigError for a model that is attached already, a schedule of another model, or offload without an
    accelerator; UnsupportedError where the model cannot run the scope.
    """
    check_own_switch(model)
    root, rows = rows_for(model, family)
    stacks = resolve(root, rows)
    if schedule is not None:
        check_schedule(schedule, stacks)
        return Handle(root, stacks, schedule, config, in_turn, plan)
    schedule = schedule_for(stacks, config, type(root).__name__)
    _warn_of_ignored(config, stacks, type(root).__name__)
    return Handle(root, stacks, schedule, config, in_turn)


def schedule_for(stacks: list[ResolvedStack], config: CheckpointConfig, model: str = "this model") -> Schedule:
    """The treatment that the controls ask for, for every block of the resolved stacks."""
    depths = {stack.name: len(stack.blocks) for stack in stacks}
    has_feed_forward = {stack.name: stack.has_feed_forward for stack in stacks}
    has_attention = {stack.name: stack.has_attention for stack in stacks}
    return config.schedule_for(depths, has_feed_forward, has_attention, model=model)


def depths_of(stacks: Sequence[ResolvedStack], config: CheckpointConfig) -> list[int]:
    """Of the stacks that interval and segment stride are about."""
    return [len(stack.blocks) for stack in stacks if config.scope != FFN or stack.has_feed_forward]


def without_last_round_trip(schedule: Schedule, stacks: Sequence[str]) -> Schedule:
    """The same schedule, but what runs last stays on the device: backward asks for it at once."""
    last = stacks[-1]
    plan = schedule.stacks[last]
    if not any(plan.moves):
        return schedule
    stay = plan.last_together
    moves = tuple(frozenset() if index in stay else moves for index, moves in enumerate(plan.moves))
    return replace(schedule, stacks={**schedule.stacks, last: replace(plan, moves=moves)})


def held_back(stacks: Sequence[ResolvedStack], wanted: Schedule, schedule: Schedule) -> set[str]:
    """Names of the blocks of which something would move, as ``wanted``, if they did not run last."""
    last = stacks[-1]
    before, after = wanted.stacks[last.name], schedule.stacks[last.name]
    return {
        name
        for index, (name, block) in enumerate(last.blocks)
        if (before.moves[index] - after.moves[index]) & movable(last, block, before.treatments[index])
    }


def _moving(stacks: Sequence[ResolvedStack], schedule: Schedule) -> tuple[dict[str, frozenset[str]], set[str]]:
    """What of each block waits in CPU memory, and of which nothing does for want of attention."""
    places = [
        (name, (stack, schedule.stacks[stack.name], index))
        for stack in stacks
        for index, (name, _) in enumerate(stack.blocks)
    ]
    return {name: moving(*place) for name, place in places}, {name for name, place in places if lacks_attention(*place)}


def _store(model: nn.Module, schedule: Schedule, config: CheckpointConfig, in_turn: InTurn | None) -> Store | None:
    if not schedule.moves_anything:
        if config.moves:
            accelerator_or_simulated()  # asked for, though nothing comes of it here
        return None
    return Store(
        model,
        min_bytes=config.offload_min_bytes,
        max_sizes=config.offload_pin_memory_max_buckets,
        in_flight_bytes=schedule.in_flight_bytes,
        prefetch_bytes=schedule.prefetch_bytes,
        pool=None if in_turn is None else in_turn.pool(),
    )


def rows_for(model: nn.Module, family: str | None) -> tuple[nn.Module, tuple[Stack, ...] | None]:
    """The module whose stacks are meant (wrappers peeled off by looking inside) and its rows, if a family knows it."""
    if family is not None:
        row = families.find(family)
        inner = _inner(model, row.class_name)
        other = _known(model) if inner is None else None
        if other is not None:
            raise ConfigError(
                f"family {family!r} is of {row.class_name}, and this model is a {other[1].class_name} "
                f"({other[1].title}). Leave family out, or give that one."
            )
        return inner or model, row.stacks
    known = _known(model)
    return (model, None) if known is None else (known[0], known[1].stacks)


def _known(model: nn.Module) -> tuple[nn.Module, Family] | None:
    """The outermost module whose class a family has."""
    for module in model.modules():
        for kind in type(module).__mro__:
            known = families.by_class(kind.__name__)
            if known is not None:
                return module, known
    return None


def _inner(model: nn.Module, class_name: str) -> nn.Module | None:
    return next((m for m in model.modules() if class_name in {kind.__name__ for kind in type(m).__mro__}), None)


def has_own_on(modules: Iterable[nn.Module]) -> bool:
    """Whether a model's own gradient checkpointing is on."""
    return any(module.__dict__.get("gradient_checkpointing") is True for module in modules)


def check_own_switch(model: nn.Module) -> None:
    for name, module in model.named_modules():
        by_hand = module.__dict__.get("_gradient_checkpointing_func", module) is None
        if by_hand and module.__dict__.get("gradient_checkpointing") is True:
            raise ConfigError(
                f"{name or type(module).__name__}.gradient_checkpointing was set to True by hand, so the model's own "
                "forward would fail. Set it to False; lowtide does not need it."
            )


def _warn_of_ignored(config: CheckpointConfig, stacks: Sequence[ResolvedStack], model: str) -> None:
    depths = depths_of(stacks, config)
    if (config.interval or 1) > max(depths, default=0):
        return  # the controls have said that the interval is wider than every stack
    for note in ignored(config, depths):
        warn_caller(f"{note.subject} is ignored for {model}: {note.reason}.")


def check_schedule(schedule: Schedule, stacks: list[ResolvedStack]) -> None:
    """Raises ConfigError for a schedule of other stacks, UnsupportedError for one that treats what no block has."""
    depths = {stack.name: len(stack.blocks) for stack in stacks}
    given = {name: stack.depth for name, stack in schedule.stacks.items()}
    if given != depths:
        raise ConfigError(f"the schedule is for stacks {given}, but this model has {depths}")
    treatments = {treatment for plan in schedule.stacks.values() for treatment in plan.treatments}
    moved = {
        treatment
        for plan in schedule.stacks.values()
        for treatment, moves in zip(plan.treatments, plan.moves, strict=True)
        if ATTENTION in moves
    }
    if FFN in treatments and not any(stack.has_feed_forward for stack in stacks):
        raise UnsupportedError("the schedule recomputes feed-forward sides, and no block of this model has one")
    if moved - {SELECTIVE} and not any(stack.has_attention for stack in stacks):  # selective sees kernels, not modules
        raise UnsupportedError("the schedule moves attention sides, and no block of this model has softmax attention")
