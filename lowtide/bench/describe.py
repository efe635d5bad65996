"""Works, conditions and modes in words, and the order in which people see them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any

from lowtide import families
from lowtide.bench.record import Condition
from lowtide.keys import AUTO
from lowtide.units import UNITS, parse_bytes

BASELINES = ("torch-checkpoint", "diffusers")
"""Other ways of recomputing: torch's own checkpoint around each block, diffusers' enable_gradient_checkpointing."""
MODES = (
    "none",
    *BASELINES,
    "activation-offload",
    "ffn",
    "unsloth-ffn",
    "unsloth-ffn-offload",
    "layer",
    "layer-offload",
    "interval2",
    "seg2-stride4",
    "seg2-stride4-offload",
    "unsloth",
    "selective",
    "selective-offload",
    AUTO,
)
"""Every mode of ``bench.modes``, in the order in which people see them."""
_TRAINED = {"lora": "LoRA", "lokr": "LoKr", "full": "all weights trained", "frozen": "frozen"}
_COMPILE = {"off": "no compile", "regional": "regional compile"}
_TOLD_SIZES = ("B", "FR", "H", "W", "T", "SEC")
_SYNTHETIC = re.compile(r"(\d+)x(\d+)")
_FREE = "what is free"
_LONGEST = 200  # characters of a file's name, so that an end and a number fit


def mode_title(condition: Condition) -> str:
    """The mode, and of ``auto`` its budget: ``"layer"``, ``"auto (12 GiB)"``, ``"auto (what is free)"``. No two budgets
    have one title."""
    budget = condition.vram_budget
    if budget is None:
        return condition.mode
    return f"{condition.mode} ({exact_size(budget) if isinstance(budget, int) else _FREE})"


def ordered_modes(conditions: Iterable[Condition]) -> tuple[str, ...]:
    """The title of each mode once: those of the bench in their order, ``auto`` by budget, then others, by name."""
    places = {mode_title(condition): _place(condition) for condition in conditions}
    return tuple(sorted(places, key=places.__getitem__))


def _place(condition: Condition) -> tuple[int, float, str]:
    known = condition.mode in MODES
    budget = condition.vram_budget
    size = budget if isinstance(budget, int) else -1 if budget is None else math.inf
    return MODES.index(condition.mode) if known else len(MODES), size, condition.mode


def plans(mode: str) -> bool:
    """Whether the schedule is chosen within a budget in the mode of this title."""
    return mode.partition(" ")[0] == AUTO


def exact_size(size_bytes: int) -> str:
    """In the largest unit in which two decimals say it exactly: ``"12 GiB"``, ``"1.5 GB"``, ``"7 B"``."""
    units = sorted(((parse_bytes(f"1{unit}"), unit) for unit in UNITS), reverse=True)
    unit_bytes, unit = next(
        (unit_bytes, unit)
        for unit_bytes, unit in units
        if size_bytes >= unit_bytes and not size_bytes * 100 % unit_bytes
    )
    hundredths = size_bytes * 100 // unit_bytes
    fraction = f".{hundredths % 100:02}".rstrip("0").rstrip(".")
    return f"{hundredths // 100}{fraction} {unit}"


def offloads(mode: str) -> bool:
    """Whether something waits in CPU memory in this mode."""
    return mode.startswith("unsloth") or mode.endswith("offload")


def distinct_names(texts: Iterable[str]) -> list[str]:
    """Each text as a name for a file and an anchor, no two alike, also where upper and lower case count as one."""
    taken: set[str] = set()
    names = []
    for text in texts:
        plain = "".join(
            char if char.isascii() and (char.isalnum() or char in "_-") else "-" for char in text[:_LONGEST]
        )
        numbered = (f"{plain}-{number}" for number in count(2))
        name = next(name for name in chain([plain], numbered) if name.lower() not in taken)
        taken.add(name.lower())
        names.append(name)
    return names


def told_apart(parts: Sequence[Mapping[str, str]]) -> tuple[list[str], str]:
    """Of ``facets`` of several conditions: what tells each from the others, and what is the same in all."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    varying = [name for name in names if len({part.get(name) for part in parts}) > 1]
    common = ", ".join(parts[0][name] for name in names if name not in varying)
    return [", ".join(part[name] for name in varying if name in part) for part in parts], common


def work_title(condition: Condition, on_cpu: bool = False) -> str:
    """``"16 blocks × 4096 tokens"``, ``"SD3 medium"``; what is no measure of the whole model on a card says so:
    ``"LTX-2 (truncated to 8 blocks)"``, ``"SD3 medium (tiny, on a CPU)"``.
    """
    title = condition.work
    if condition.kind == "synthetic" and (shape := synthetic_shape(condition.work)):
        title = f"{shape[0]} blocks × {shape[1]} tokens"
    elif condition.kind == "family" and families.known(condition.work):
        title = families.find(condition.work).title
    cut = ", ".join(f"{blocks} {stack}" for stack, blocks in condition.depth.items())
    notes = ["tiny" * (condition.size == "tiny"), "on a CPU" * on_cpu, f"truncated to {cut}" if cut else ""]
    return f"{title} ({', '.join(filter(None, notes))})" if any(notes) else title


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
    """What makes a condition, its work and mode left out, each part in words, by name and in order.

    Of the sizes, those that people set, and what is another one than the family's.
    """
    usual = _usual_sizes(condition)
    told = {*_TOLD_SIZES, *(name for name, value in condition.sizes.items() if value != usual.get(name))}
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
    return {**_usual_sizes(condition), **condition.sizes}


def _usual_sizes(condition: Condition) -> Mapping[str, int]:
    if condition.kind == "family" and families.known(condition.work):
        row = families.find(condition.work)
        return (row.tiny if condition.size == "tiny" else row.real).vars
    return {}


def trained_in_words(adapter: str, rank: int | None) -> str:
    """``"LoRA 16"``, ``"frozen"``."""
    word = _TRAINED.get(adapter, adapter)
    return f"{word} {rank}" if rank and adapter == "lora" else word


def compile_in_words(setting: str) -> str:
    return _COMPILE.get(setting, setting)
