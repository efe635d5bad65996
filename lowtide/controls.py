"""The user's controls of checkpointing: one validated model of the keys, and the schedule that they ask for."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from lowtide.errors import UnsupportedError
from lowtide.keys import Choice, Keys, Switch, WholeNumber, boolean_of, is_unset
from lowtide.plan.schedule import FFN, WHOLE, Schedule, StackSchedule, feed_forwards, keep_all, whole_blocks

SCOPES: Mapping[str, str] = {"torch": WHOLE, "torch-ffn": FFN}
"""Treatment that each backend gives to the blocks it treats."""

BACKENDS = tuple(SCOPES)

_backend = Choice(
    BACKENDS, hint="To recompute nothing, set gradient_checkpointing to false (lowtide.attach: backend=None)."
)


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
        "each block; saves less, costs less time.",
    )
    interval: Annotated[int | None, BeforeValidator(WholeNumber(1))] = Field(
        default=None,
        alias="gradient_checkpointing_interval",
        description="With `torch`: segment width n. Blocks 0 to n-1, n to 2n-1, … share one checkpoint: every block is "
        "still recomputed, fewer boundaries are kept, the working set in backward is n blocks. With `torch-ffn`: block "
        "i's feed-forward side is recomputed if i mod n = 0. i counts from 0 in each stack. 1 or unset: every block.",
    )
    segment_stride: Annotated[int | None, BeforeValidator(WholeNumber(1))] = Field(
        default=None,
        alias="gradient_checkpointing_segment_stride",
        description="Distance s between segment starts, at least the interval n: interval 2 and stride 4 recompute "
        "blocks 0-1, keep 2-3, recompute 4-5, … With `torch-ffn`: block i is treated if i mod s < n. Unset: no gaps.",
    )

    # Written out for type checkers: without it they would know the keys of JSON files only, with checked types only.
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        width, stride = self.interval, self.segment_stride
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

    @classmethod
    def for_attach(cls, backend: Any, interval: Any = None, segment_stride: Any = None) -> Self:
        """The controls as the arguments of ``lowtide.attach`` give them, where no backend (None) means: keep all."""
        if is_unset(backend):
            return cls(gradient_checkpointing=False, interval=interval, segment_stride=segment_stride)
        return cls(backend=backend, interval=interval, segment_stride=segment_stride)

    def attach_arguments(self) -> dict[str, Any]:
        """The same as keyword arguments of ``lowtide.attach``."""
        backend = self.backend if self.gradient_checkpointing else None
        return {"backend": backend, "interval": self.interval, "segment_stride": self.segment_stride}

    @property
    def scope(self) -> str | None:
        """Treatment of the blocks that are treated: ``"whole"`` or ``"ffn"``; None where nothing is recomputed."""
        return SCOPES[self.backend] if self.gradient_checkpointing else None

    def schedule_for(
        self, depths: Mapping[str, int], feed_forward: Mapping[str, bool], *, model: str = "this model"
    ) -> Schedule:
        """The treatment of every block.

        depths: number of blocks of each stack. feed_forward: whether any of its blocks has a feed-forward side.
        model: how to name the model to people. Warns where the interval is wider than every stack.
        Raises UnsupportedError where the scope is the feed-forward side and no stack has one.
        """
        if self.scope == FFN and not any(feed_forward[name] for name in depths):
            raise UnsupportedError(_no_feed_forward(self.backend, model))
        self._warn_if_wide(depths.values(), model)
        return Schedule({name: self._stack(depth, feed_forward[name]) for name, depth in depths.items()})

    def _stack(self, depth: int, has_feed_forward: bool) -> StackSchedule:
        if self.scope == WHOLE:
            return whole_blocks(depth, self.interval or 1, self.segment_stride)
        if self.scope == FFN and has_feed_forward:
            return feed_forwards(depth, self.interval or 1, self.segment_stride)
        return keep_all(depth)

    def _warn_if_wide(self, depths: Iterable[int], model: str) -> None:
        deepest = max(depths, default=0)
        if self.interval is None or self.interval <= deepest:
            return
        if self.scope == WHOLE:
            effect = "each stack is one segment"
        elif self.segment_stride is None:
            effect = "only the first block of each stack is treated"
        else:
            effect = "every block is treated"
        warnings.warn(
            f"interval {self.interval} is wider than the deepest block stack of {model} ({deepest} blocks): {effect}.",
            stacklevel=3,
        )


def parse_switch(value: Any, backends: tuple[str, ...] = BACKENDS) -> bool | str | None:
    """What a person means by the one value that switches checkpointing: on, off, a backend's name, or None for unset.

    Raises ConfigError for anything else.
    """
    if is_unset(value):
        return None
    answer = boolean_of(value)
    return Choice(("true", "false", *backends))(value) if answer is None else answer


def scopes_of(feed_forward: Iterable[bool]) -> list[str]:
    """The backends that a model can run. feed_forward: whether each of its stacks has a feed-forward side."""
    any_feed_forward = any(feed_forward)
    return [backend for backend, scope in SCOPES.items() if scope != FFN or any_feed_forward]


def _no_feed_forward(backend: str, model: str) -> str:
    return (
        f"backend {backend!r} recomputes feed-forward sides, and no block of {model} has one. "
        f"Backends that it can run: {', '.join(scopes_of([False]))}."
    )
