"""Works, conditions and modes in words, and the order in which people see them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lowtide import families
from lowtide.bench.record import Condition

BASELINES = ("torch-checkpoint", "diffusers")
"""Other ways of recomputing: torch's own checkpoint around each block, diffusers' enable_gradient_checkpointing."""
MODES = (
    "none",
    *BASELINES,
    "activation-offload",
    "ffn",
    "unsloth-ffn",
    "layer",
    "layer-offload",
    "interval2",
    "seg2-stride4",
    "seg2-stride4-offload",
    "unsloth",
    "selective",
    "selective-offload",
    "auto",
)
_TRAINED = {"lora": "LoRA", "lokr": "LoKr", "full": "all weights trained", "frozen": "frozen"}
_COMPILE = {"off": "no compile", "regional": "regional compile"}
_TOLD_SIZES = ("B", "FR", "H", "W", "T", "SEC")
_SYNTHETIC = re.compile(r"(\d+)x(\d+)")


def ordered_modes(found: Iterable[str], kind: str) -> tuple[str, ...]:
    """Every mode that a report has a row for: the known ones in their order, then what else was found, by name."""
    known = [mode for mode in MODES if mode != "diffusers" or kind == "family"]
    return (*known, *sorted(set(found) - set(known)))


def work_title(condition: Condition) -> str:
    """``"16 blocks × 4096 tokens"``, ``"SD3 medium"``; a cut model says so: ``"LTX-2 (cut to 8 blocks)"``."""
    title = condition.work
    if condition.kind == "synthetic" and (shape := synthetic_shape(condition.work)):
        title = f"{shape[0]} blocks × {shape[1]} tokens"
    elif condition.kind == "family" and families.known(condition.work):
        title = families.find(condition.work).title
    cut = ", ".join(f"{blocks} {stack}" for stack, blocks in condition.depth.items())
    notes = [*(["tiny"] if condition.size == "tiny" else []), *([f"truncated to {cut}"] if cut else [])]
    return f"{title} ({', '.join(notes)})" if notes else title


def work_order(condition: Condition) -> tuple[Any, ...]:
    """Sort key: synthetic works by size, then families as ``lowtide families`` lists them, then the rest by name."""
    if condition.kind == "synthetic":
        return (0, synthetic_shape(condition.work) or (), condition.work)
    keys = [family.key for family in families.all_families()]
    known = families.known(condition.work)
    return (1, keys.index(families.find(condition.work).key) if known else len(keys), condition.work)


def synthetic_shape(work: str) -> tuple[int, int] | None:
    """Blocks and tokens of a synthetic work ("16x4096"), or None for another name."""
    match = _SYNTHETIC.fullmatch(work)
    return (int(match[1]), int(match[2])) if match else None


def facets(condition: Condition, card: str) -> dict[str, str]:
    """What makes a condition, its work and mode left out, each part in words, by name and in order."""
    told = {*_TOLD_SIZES, *condition.sizes}
    return {
        "card": card,
        "precision": condition.precision,
        "trained": trained_in_words(condition.adapter, condition.rank),
        "compile": compile_in_words(condition.compile),
        "attention": f"{condition.attention} attention",
        **{size: f"{size} {value}" for size, value in sizes_of(condition).items() if size in told},
    }


def sizes_of(condition: Condition) -> dict[str, int]:
    """The sizes of the inputs, with those of the family's real configuration where the record names none."""
    usual: Mapping[str, int] = {}
    if condition.kind == "family" and families.known(condition.work):
        row = families.find(condition.work)
        usual = (row.tiny if condition.size == "tiny" else row.real).vars
    return {**usual, **condition.sizes}


def trained_in_words(adapter: str, rank: int | None) -> str:
    """``"LoRA 16"``, ``"frozen"``."""
    word = _TRAINED.get(adapter, adapter)
    return f"{word} {rank}" if rank and adapter == "lora" else word


def compile_in_words(setting: str) -> str:
    return _COMPILE.get(setting, setting)
