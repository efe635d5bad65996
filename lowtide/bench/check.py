"""Which conditions can be measured at all."""

from collections.abc import Collection

from lowtide import families
from lowtide.bench.attention import ATTENTION
from lowtide.bench.describe import synthetic_shape
from lowtide.bench.modes import MODES
from lowtide.bench.precision import PRECISIONS
from lowtide.bench.record import Condition
from lowtide.errors import ConfigError
from lowtide.keys import AUTO
from lowtide.measure.inputs import namespace

_COMPILE = ("off", "regional")
_SIZES = ("real", "tiny")
_ADAPTERS = {"synthetic": ("frozen", "lora", "full"), "family": ("lora", "full")}


def check(condition: Condition) -> None:
    """Raises ConfigError for a field that is not allowed: says what is."""
    _among("mode", condition.mode, MODES)
    _among("precision", condition.precision, PRECISIONS)
    _among("compile", condition.compile, _COMPILE)
    _among("attention", condition.attention, ATTENTION)
    _among("size", condition.size, _SIZES)
    _among("adapter", condition.adapter, _ADAPTERS[condition.kind])
    if condition.kind == "synthetic":
        if synthetic_shape(condition.work) is None:
            raise ConfigError(f"work {condition.work!r} is not allowed; expected BLOCKSxTOKENS, as in 16x4096")
    else:
        row = families.find(condition.work)
        namespace(row.tiny if condition.size == "tiny" else row.real, condition.sizes)
    if condition.adapter == "full" and condition.precision != "bf16":
        raise ConfigError(f"precision {condition.precision} trains a LoRA only: its weights are quantised")
    _check_budget(condition)


def _check_budget(condition: Condition) -> None:
    if condition.mode == AUTO and condition.vram_budget is None:
        raise ConfigError(f"mode {AUTO} needs a budget; `bench synthetic` and `bench family` take one: --vram-budget")
    if condition.size == "tiny" and condition.vram_budget == AUTO:
        raise ConfigError(
            f"mode {AUTO} at --size tiny runs on the CPU, where nothing tells what is free: give a --vram-budget, as "
            "in 128MiB"
        )


def _among(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not allowed; allowed: {', '.join(allowed)}")
