"""Every family as people and programs see it: counted on the classes themselves, so nothing can drift."""

import functools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowtide import families
from lowtide.families import Family, Stack
from lowtide.measure.build import build_model
from lowtide.measure.inspection import feed_forward_names, scopes_of_stacks
from lowtide.runtime.resolve import ResolvedStack, resolve

_PUBLISHED = re.compile(r"([\d.]+)([BM])(?: \((.*)\))?")
_UNITS = {"B": 1e9, "M": 1e6}
_NEAR = 0.01
_BLOCK, _MICRO_BLOCK = "block", "micro-block"


@functools.cache
def describe_families() -> tuple[dict[str, Any], ...]:
    """Every family with its real configuration, built on the meta device: seconds, so once a process."""
    with _without_own_deprecations():
        return tuple(describe_family(family) for family in families.all_families())


def describe_family(family: Family) -> dict[str, Any]:
    """What ``lowtide families --json`` says of one.

    parameters: counted. published: the size that its makers state, and ``difference`` why the count is another one,
    None where it is within 1 %.
    """
    model = build_model(family, "real", device="meta")
    stacks = resolve(model, family.stacks)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "key": family.key,
        "title": family.title,
        "class": family.class_path,
        "aliases": list(family.aliases),
        "stacks": [_stack_as_dict(stack) for stack in stacks],
        "scopes": scopes_of_stacks(stacks),
        "semantics": semantics(family),
        "block_classes": list(family.block_classes),
        "parameters": parameters,
        "published": family.published,
        "difference": difference(family.published, parameters),
    }


def semantics(family: Family) -> dict[str, str]:
    """What interval n and segment stride s count in this family, by scope. i counts from 0 in each stack."""
    unit = _MICRO_BLOCK if any(_unit(stack) == _MICRO_BLOCK for stack in family.stacks) else _BLOCK
    order = " in call order" if unit == _MICRO_BLOCK else ""
    meanings = {
        "unit": unit,
        "interval": f"segments of n neighbouring {unit}s{order}",
        "segment_stride": f"a segment begins every s {unit}s{order}; those between two segments are kept",
    }
    if any(stack.feed_forward for stack in family.stacks):
        meanings["interval_ffn"] = f"the feed-forward side of {unit} i, if i mod n = 0"
        meanings["segment_stride_ffn"] = f"the feed-forward side of {unit} i, if i mod s < n"
    return meanings


def difference(published: str, parameters: int) -> str | None:
    """Why a count is not the published size: None within 1 %, else what the row says, or that the size is rounded.

    Raises ValueError where nothing explains it.
    """
    match = _PUBLISHED.match(published)
    if match is None:
        raise ValueError(f"{published!r} is no size; write one as in '2.6B' or '860M (what is counted)'")
    stated, unit, note = float(match[1]), _UNITS[match[2]], match[3]
    if abs(parameters - stated * unit) <= _NEAR * stated * unit:
        return None
    places = len(match[1].partition(".")[2])
    if note is None and round(parameters / unit, places) != stated:
        raise ValueError(f"{parameters:,} parameters are not the published {published}, and the row does not say why")
    return note or "rounded"


def _stack_as_dict(stack: ResolvedStack) -> dict[str, Any]:
    return {
        "path": stack.name,
        "blocks": list(stack.row.blocks),
        "depth": len(stack.blocks),
        "unit": _unit(stack.row),
        "ffn": list(feed_forward_names(stack)),
        "attention": [path for path in stack.row.attention if any(_has(stack, path))],
    }


def _has(stack: ResolvedStack, path: str) -> Iterator[bool]:
    return (path in dict(stack.attention_sides(block)) for _, block in stack.blocks)


def _unit(stack: Stack) -> str:
    """A stack put together from several lists holds micro-blocks; one list holds blocks."""
    parts = [pattern.count("*") + pattern.count("#") for pattern in stack.blocks]
    return _BLOCK if parts == [1] else _MICRO_BLOCK


@contextmanager
def _without_own_deprecations() -> Iterator[None]:
    """Chroma builds a part that diffusers itself calls deprecated: nobody who lists families can change that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
        yield
