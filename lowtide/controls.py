"""The user's controls of checkpointing: one validated model of the keys, and the schedule that they ask for."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from lowtide.errors import ConfigError, UnsupportedError
from lowtide.keys import AUTO, Budget, Choice, Keys, Size, Switch, Text, WholeNumber, boolean_of, is_unset, key_of
from lowtide.plan.saved_plan import load_plan
from lowtide.plan.schedule import (
    ATTENTION,
    BOUNDARY,
    FFN,
    IN_SEGMENTS,
    KEPT,
    MAX_SIZES,
    MIN_BYTES,
    SAVED,
    SELECTIVE,
    WHOLE,
    Schedule,
    StackSchedule,
    feed_forwards,
    keep_all,
    whole_blocks,
)
from lowtide.warn import warn_caller

_log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class _Backend:
    """What one does with the blocks that it treats. moves: what of them waits in CPU memory."""

    treatment: str
    moves: frozenset[str] = frozenset()


_BACKENDS: Mapping[str, _Backend] = {
    "torch": _Backend(WHOLE),
    "torch-ffn": _Backend(FFN),
    "unsloth": _Backend(WHOLE, frozenset({BOUNDARY})),
    "unsloth-ffn": _Backend(FFN, frozenset({BOUNDARY})),
    "torch-selective": _Backend(SELECTIVE),
    "unsloth-selective": _Backend(SELECTIVE, frozenset({BOUNDARY, ATTENTION})),
}

_LOOKED_FOR = (
    "no block of {model} has an attention module (one that its family names; where no family describes the class, a "
    "part of a block with `attn` or `attention` in its name)"
)
_BY_KERNEL = "Blocks that call the attention kernel by themselves are for backend auto, or a schedule with {word!r}"

BACKENDS = tuple(_BACKENDS)
"""Those that treat blocks by a fixed rule; ``auto`` chooses for each block."""

_backend = Choice(
    (*BACKENDS, AUTO), hint="To recompute nothing, set gradient_checkpointing to false (lowtide.attach: backend=None)."
)


_OF_A_BACKEND = ("interval", "segment_stride", "offload_attention")
"""What ``auto`` chooses by itself."""
_BESIDE_NO_SCHEDULE = ("gradient_checkpointing", "backend", "vram_budget", *_OF_A_BACKEND)
"""What a saved plan says by itself, or replaces."""


class CheckpointConfig(Keys):
    """The controls. Takes the keys of a flat JSON file, or the same without ``gradient_checkpointing_``.

    An unset backend is ``torch``; ``gradient_checkpointing=False`` is what ``lowtide.attach(backend=None)`` means.
    Raises ConfigError (a ValueError) for an unknown key, a wrong value, or keys that contradict each other.
    """

    gradient_checkpointing: Annotated[bool, BeforeValidator(Switch())] = Field(
        default=True,
        description="Master switch of recomputation. false: every activation is kept, "
        "as with `lowtide.attach(model, backend=None)`.",
    )
    backend: Annotated[str, BeforeValidator(_backend)] = Field(
        default="torch",
        alias="gradient_checkpointing_backend",
        description="What is recomputed in backward. `torch`: whole blocks. `torch-ffn`: only the feed-forward side of "
        "each block; saves less, costs less time. `torch-selective`: whole blocks, but the outputs of the attention "
        "kernels are kept, so that attention never runs twice. `unsloth`, `unsloth-ffn`, `unsloth-selective`: the "
        "same, and what the checkpoint itself must keep (the inputs of what is recomputed, those attention outputs) "
        "waits in CPU memory; they need an accelerator. `auto`: the quickest treatment of each block within "
        "`vram_budget`, found in the first steps (docs/auto.md).",
    )
    vram_budget: Annotated[int | str | None, BeforeValidator(Budget())] = Field(
        default=None,
        description="For `auto`: what PyTorch may reserve of the accelerator's memory, as in 16GiB. `auto` or unset: "
        "what is free and what this process holds, less 512 MiB or 3 %, whichever is more.",
    )
    schedule: Annotated[str | None, BeforeValidator(Text("the file of a saved plan"))] = Field(
        default=None,
        alias="gradient_checkpointing_schedule",
        description="The file of a plan that `lowtide plan --save` wrote (docs/plan.md), or a run with `auto`: the "
        "treatment of each block, instead of a backend and the keys that belong to one.",
    )
    interval: Annotated[int | None, BeforeValidator(WholeNumber(1))] = Field(
        default=None,
        alias="gradient_checkpointing_interval",
        description="For whole blocks: segment width n. Blocks 0 to n-1, n to 2n-1, … share one checkpoint: every "
        "block is still recomputed, fewer boundaries are kept, the working set in backward is n blocks. For "
        "feed-forward sides (`torch-ffn`, `unsloth-ffn`): block i's is recomputed if i mod n = 0. i counts from 0 in "
        "each stack. 1 or unset: every block.",
    )
    segment_stride: Annotated[int | None, BeforeValidator(WholeNumber(1))] = Field(
        default=None,
        alias="gradient_checkpointing_segment_stride",
        description="Distance s between segment starts, at least the interval n, without which it is an error: "
        "interval 2 and stride 4 recompute blocks 0-1, keep 2-3, recompute 4-5, … For feed-forward sides: block i is "
        "treated if i mod s < n. The blocks between stay on the accelerator with every backend. Unset: no gaps.",
    )
    offload_attention: Annotated[bool, BeforeValidator(Switch())] = Field(
        default=False,
        alias="gradient_checkpointing_offload_attention",
        description="What the attention side of a block saves for backward waits in CPU memory, in every block that "
        "keeps it: without recomputation, beside `torch-ffn` and `unsloth-ffn`, in the blocks between segments; with "
        "`torch-selective` it moves the kept attention outputs. Where attention is recomputed there is nothing to "
        "move. Needs an accelerator.",
    )
    offload_pin_memory_max_buckets: Annotated[int, BeforeValidator(WholeNumber(0))] = Field(
        default=MAX_SIZES,
        alias="gradient_checkpointing_offload_pin_memory_max_buckets",
        description="How many distinct sizes of pinned buffers the pool in CPU memory keeps. 0: ordinary CPU memory "
        "only, whose copies are slower and hold up the computation.",
    )
    offload_min_bytes: Annotated[int, BeforeValidator(Size())] = Field(
        default=MIN_BYTES,
        alias="gradient_checkpointing_offload_min_bytes",
        description="Tensors whose storage is smaller stay on the accelerator.",
    )

    # Written out for type checkers: without it they would know the keys of JSON files only, with checked types only.
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        given = next((keys[key] for key in ("backend", "gradient_checkpointing_backend") if key in keys), None)
        if given is not None and is_unset(given) and self.gradient_checkpointing and self.schedule is None:
            _log.warning(
                "backend %r counts as not set, so it is %s; what recomputes nothing is gradient_checkpointing = false",
                given,
                self.backend,
            )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        width, stride = self.interval, self.segment_stride
        self._check_schedule()
        self._check_auto()
        if not self.gradient_checkpointing and (width, stride) != (None, None):
            field, value = ("interval", width) if width is not None else ("segment_stride", stride)
            raise ValueError(
                f"{{{field}}} = {value} needs a backend, but recomputation is switched off. Leave {{{field}}} out, or "
                f"switch recomputation on (gradient_checkpointing true and one of the backends {', '.join(BACKENDS)})."
            )
        if stride is not None and width is None:
            raise ValueError(
                f"{{segment_stride}} = {stride} needs {{interval}}, the width of a segment: 1 to {stride} is allowed."
            )
        if stride is not None and width is not None and stride < width:
            raise ValueError(
                f"{{segment_stride}} = {stride} is smaller than {{interval}} = {width}, so segments would overlap; "
                f"allowed: {width} or more."
            )
        return self

    def _check_auto(self) -> None:
        given = self._given(_OF_A_BACKEND)
        if self.is_auto and given:
            raise ValueError(
                f"{{backend}} = auto chooses for each block by itself: leave {' and '.join(given)} out "
                "(null in a file, none on a command line)."
            )
        if self.vram_budget is not None and not self.is_auto:
            raise ValueError("{vram_budget} bounds what {backend} = auto chooses, and nothing else: set that, too.")

    def _check_schedule(self) -> None:
        given = self._given(_BESIDE_NO_SCHEDULE) if self.schedule is not None else []
        if given:
            raise ValueError(
                f"{{schedule}} says by itself what is done with every block: leave {' and '.join(given)} out "
                "(null in a file, none on a command line)."
            )

    def _given(self, names: Iterable[str]) -> list[str]:
        """Those that are not as usual, as messages name them."""
        fields = type(self).model_fields
        return [f"{{{name}}}" for name in names if getattr(self, name) != fields[name].default]

    @classmethod
    def displaced_by(cls, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Flat keys that cannot stand beside those that somebody has chosen: they give way, where they come from a file
        and the choice from a command line."""
        fields = {name: key_of(name, field) for name, field in cls.model_fields.items()}
        given = {name: chosen[key] for name, key in fields.items() if key in chosen}
        names: set[str] = set()
        if not is_unset(given.get("schedule")):
            names.update(_BESIDE_NO_SCHEDULE)
        if "backend" in given:
            names.update(_OF_A_BACKEND if str(given["backend"]).strip().lower() == AUTO else ("vram_budget",))
            names.update(() if is_unset(given["backend"]) else ("gradient_checkpointing", "schedule"))
        if boolean_of(given.get("gradient_checkpointing")) is False:
            names |= {"schedule", "vram_budget", "backend", "interval", "segment_stride"}
        return tuple(fields[name] for name in names if name not in given)

    @classmethod
    def for_attach(
        cls,
        backend: Any,
        interval: Any = None,
        segment_stride: Any = None,
        offload_attention: Any = False,
        offload_pin_memory_max_buckets: Any = MAX_SIZES,
        offload_min_bytes: Any = MIN_BYTES,
        vram_budget: Any = None,
        schedule: Any = None,
    ) -> Self:
        """The controls as the arguments of ``lowtide.attach`` give them: no backend (None) recomputes nothing, unless
        there is the file of a schedule."""
        given = {
            "interval": interval,
            "segment_stride": segment_stride,
            "offload_attention": offload_attention,
            "offload_pin_memory_max_buckets": offload_pin_memory_max_buckets,
            "offload_min_bytes": offload_min_bytes,
            "vram_budget": vram_budget,
            "schedule": schedule,
        }
        keeps_all = is_unset(backend) and is_unset(schedule)
        return cls(gradient_checkpointing=False, **given) if keeps_all else cls(backend=backend, **given)

    def attach_arguments(self) -> dict[str, Any]:
        """The same as keyword arguments of ``lowtide.attach``."""
        return {
            "backend": self.backend if self.gradient_checkpointing and self.schedule is None else None,
            "interval": self.interval,
            "segment_stride": self.segment_stride,
            "offload_attention": self.offload_attention,
            "offload_pin_memory_max_buckets": self.offload_pin_memory_max_buckets,
            "offload_min_bytes": self.offload_min_bytes,
            "vram_budget": self.vram_budget,
            "schedule": self.schedule,
        }

    @property
    def is_auto(self) -> bool:
        return self.gradient_checkpointing and self.backend == AUTO

    def planned(self) -> Schedule | None:
        """The schedule of the saved plan, if one is named. Raises ConfigError where it cannot be read."""
        return None if self.schedule is None else load_plan(self.schedule).schedule

    @property
    def scope(self) -> str | None:
        """Treatment of the blocks that are treated: whole, ffn or selective; None where nothing is recomputed, and
        where ``auto`` or a saved plan says it for each block."""
        return _BACKENDS[self.backend].treatment if self._is_fixed else None

    @property
    def moves(self) -> bool:
        """Whether anything is asked to wait in CPU memory, so that an accelerator is needed."""
        return self.offload_attention or bool(self.backend_moves)

    @property
    def backend_moves(self) -> frozenset[str]:
        """What of the blocks that the backend treats waits in CPU memory."""
        return _BACKENDS[self.backend].moves if self._is_fixed else frozenset()

    @property
    def _is_fixed(self) -> bool:
        return self.gradient_checkpointing and self.backend != AUTO and self.schedule is None

    def schedule_for(
        self,
        depths: Mapping[str, int],
        feed_forward: Mapping[str, bool],
        attention: Mapping[str, bool],
        *,
        model: str = "this model",
    ) -> Schedule:
        """The treatment of every block, and what of it waits in CPU memory.

        depths: number of blocks of each stack. feed_forward, attention: whether any of its blocks has a feed-forward
        side, and a softmax-attention side. model: how to name the model to people. Warns where the interval is wider
        than every stack. Raises UnsupportedError where no stack has the side that the backend or ``offload_attention``
        is about.
        """
        if self.is_auto:
            raise ConfigError(
                "backend = auto has no schedule before the first steps of training: `lowtide plan` shows what it would "
                "choose"
            )
        planned = self.planned()
        if planned is not None:
            return planned
        self._check_sides(any(feed_forward[name] for name in depths), any(attention[name] for name in depths), model)
        self._warn_if_wide(depths.values(), model)
        return Schedule(
            {name: self._stack(depth, feed_forward[name], attention[name]) for name, depth in depths.items()}
        )

    def _check_sides(self, feed_forward: bool, attention: bool, model: str) -> None:
        possible = ", ".join(scopes_of([feed_forward], [attention]))
        what = f"backend {self.backend!r}"
        if self.scope == FFN and not feed_forward:
            raise UnsupportedError(
                f"{what} recomputes feed-forward sides, and no block of {model} has one. "
                f"Backends that it can run: {possible}."
            )
        if self.scope == SELECTIVE and not attention:
            raise UnsupportedError(
                f"{what} keeps the outputs of softmax attention, and {_LOOKED_FOR.format(model=model)}. "
                f"{_BY_KERNEL.format(word=SELECTIVE)}. Backends that it can run: {possible}."
            )
        if self.offload_attention and not attention:
            raise UnsupportedError(
                f"offload_attention moves what softmax attention saves, and {_LOOKED_FOR.format(model=model)}. "
                f"Leave it out. {_BY_KERNEL.format(word=f'{KEPT}+{SAVED}')}. Backends that it can run: {possible}."
            )

    def _stack(self, depth: int, has_feed_forward: bool, has_attention: bool) -> StackSchedule:
        plan = self._treatments(depth, has_feed_forward)
        treated = [index for index, treatment in enumerate(plan.treatments) if treatment != KEPT]
        sides = frozenset({BOUNDARY, ATTENTION} if has_attention else {BOUNDARY})
        plan = plan.moving(self.backend_moves & sides, treated)  # a backend leaves the blocks between segments alone
        return plan.moving({ATTENTION} & sides) if self.offload_attention else plan

    def _treatments(self, depth: int, has_feed_forward: bool) -> StackSchedule:
        if self.scope in IN_SEGMENTS:
            return whole_blocks(depth, self.interval or 1, self.segment_stride, self.scope)
        if self.scope == FFN and has_feed_forward:
            return feed_forwards(depth, self.interval or 1, self.segment_stride)
        return keep_all(depth)

    def _warn_if_wide(self, depths: Iterable[int], model: str) -> None:
        deepest = max(depths, default=0)
        if self.interval is None or self.interval <= deepest:
            return
        if self.scope in IN_SEGMENTS:
            effect = "each stack is one segment"
        elif self.segment_stride is None:
            effect = "only the first block of each stack is treated"
        else:
            effect = "every block is treated"
        warn_caller(
            f"interval {self.interval} is wider than the deepest block stack of {model} ({deepest} blocks): {effect}."
        )


def parse_switch(value: Any, backends: tuple[str, ...] = (*BACKENDS, AUTO)) -> bool | str | None:
    """What a person means by the one value that switches checkpointing: on, off, a backend's name, or None for unset.

    Raises ConfigError for anything else.
    """
    if is_unset(value):
        return None
    answer = boolean_of(value)
    return Choice(("true", "false", *backends))(value) if answer is None else answer


def scopes_of(feed_forward: Iterable[bool], attention: Iterable[bool]) -> list[str]:
    """The backends that a model can run. feed_forward, attention: whether each of its stacks has such a side."""
    possible = {WHOLE: True, FFN: any(feed_forward), SELECTIVE: any(attention)}
    return [name for name, backend in _BACKENDS.items() if possible[backend.treatment]]
