"""The modes that benchmarks/offload.py compares, and the text form of a mixed schedule.

A mixed schedule is one line: words of ``lowtide.plan.schedule.mixed`` that repeat over the blocks of all stacks in
order, and settings, separated by semicolons:

    3*ffn+boundary+attention+saved, kept+saved; tail=2; prefetch=512; inflight=256

``3*word`` stands for the word three times. tail: so many last blocks are kept, and move nothing. prefetch, inflight:
MiB. ``single_transformer_blocks: word, word`` is a cycle of that stack alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from works import Task

import lowtide
from lowtide.bench.torch_checkpoint import checkpointed
from lowtide.errors import ConfigError
from lowtide.plan.schedule import KEPT, Schedule, mixed
from lowtide.runtime.resolve import ResolvedStack

Enter = Callable[[Task, dict[str, Any]], AbstractContextManager[Any]]
"""Puts a task's model into a mode, for the duration of a ``with``; the dict is passed on to lowtide.attach."""


def _attached(**settings: Any) -> Enter:
    return lambda task, more: lowtide.attach(task.model, **settings, **more)


MODES: dict[str, Enter] = {
    "none": lambda task, more: nullcontext(),
    "torch-checkpoint": lambda task, more: checkpointed(task.blocks),
    "torch": _attached(),
    "unsloth": _attached(backend="unsloth"),
    "torch-ffn": _attached(backend="torch-ffn"),
    "unsloth-ffn": _attached(backend="unsloth-ffn"),
    "attention-offload": _attached(backend=None, offload_attention=True),
    "unsloth-ffn+attention": _attached(backend="unsloth-ffn", offload_attention=True),
    "torch-selective": _attached(backend="torch-selective"),
    "unsloth-selective": _attached(backend="unsloth-selective"),
}

_FFN, _FFN_ALL, _SELECTIVE = "ffn+boundary+attention", "ffn+boundary+saved", "selective+boundary+attention"
MIXED: dict[str, tuple[str, ...]] = {
    "16x16384": (
        f"3*{_FFN}, kept+saved",
        f"3*{_FFN}, kept+saved; inflight=384; prefetch=384",
        f"2*{_FFN}, kept+saved; inflight=384; prefetch=384",
        f"{_FFN}; inflight=256; prefetch=256",
    ),
    "16x4096": (
        f"{_FFN}, {_SELECTIVE}; tail=1",
        f"{_FFN}, 2*{_SELECTIVE}; tail=1",
        f"{_FFN}, 2*{_SELECTIVE}; tail=2",
        f"{_FFN}, selective+boundary; tail=1",
    ),
    "16x1024": (f"{_FFN}, {_SELECTIVE}; tail=2",),
    "wan": (
        f"{_FFN_ALL}, {_SELECTIVE}; tail=1",
        f"{_FFN_ALL}, {_SELECTIVE}; tail=1; inflight=1024; prefetch=1024",
        f"2*{_FFN_ALL}, {_SELECTIVE}; tail=1; inflight=1024; prefetch=1024",
    ),
    "sd3": (
        f"{_FFN_ALL}, 2*{_SELECTIVE}; tail=1",
        f"{_FFN_ALL}, 4*{_SELECTIVE}; tail=2",
        f"{_FFN_ALL}, 3*selective+boundary; tail=1",
    ),
    "flux": (
        f"{_FFN_ALL}, {_SELECTIVE}; tail=2",
        f"2*{_FFN_ALL}, 3*{_SELECTIVE}; tail=2",
        f"2*{_FFN_ALL}, 3*selective+boundary; tail=1",
    ),
}
"""Schedules tried on each work. Extend freely; the command line takes more."""


@dataclass
class _Parsed:
    everywhere: list[str] = field(default_factory=list)
    of_stack: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)


def schedule_of(text: str, stacks: Sequence[ResolvedStack]) -> Schedule:
    """The schedule that a line describes, for these stacks. Raises ConfigError or ValueError for a wrong line."""
    parsed = _parse(text)
    names = [(stack.name, index) for stack in stacks for index in range(len(stack.blocks))]
    words: dict[str, list[str]] = {stack.name: [] for stack in stacks}
    for number, (stack, index) in enumerate(names):
        cycle = parsed.of_stack.get(stack)
        word = cycle[index % len(cycle)] if cycle else parsed.everywhere[number % len(parsed.everywhere)]
        in_tail = number >= len(names) - parsed.settings.get("tail", 0)
        words[stack].append(KEPT if in_tail else word)
    return Schedule(
        {stack: mixed(chosen) for stack, chosen in words.items()},
        in_flight_bytes=_mib(parsed.settings, "inflight"),
        prefetch_bytes=_mib(parsed.settings, "prefetch"),
    )


def _mib(settings: dict[str, int], name: str) -> int | None:
    return settings[name] * 2**20 if name in settings else None


def _parse(text: str) -> _Parsed:
    parsed = _Parsed()
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = part.partition("=")
        stack, colon, cycle = part.partition(":")
        if equals:
            if name not in ("tail", "prefetch", "inflight"):
                raise ConfigError(f"unknown setting {name!r} in {text!r}; allowed: tail, prefetch, inflight")
            parsed.settings[name] = int(value)
        elif colon:
            parsed.of_stack[stack.strip()] = _words(cycle)
        else:
            parsed.everywhere = _words(part)
    return parsed


def _words(text: str) -> list[str]:
    words = []
    for item in text.split(","):
        count, star, word = item.strip().rpartition("*")
        words += [word] * (int(count) if star else 1)
    return words


def by_schedule(text: str) -> Enter:
    """A mode from a mixed schedule's line."""
    return lambda task, more: lowtide.attach(task.model, schedule=schedule_of(text, task.stacks), **more)
