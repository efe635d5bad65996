"""Compares what a replay saved with what its forward saved; rules 10 and 13 of segment.py."""

import math
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import ReplayError
from lowtide.runtime.placeholder import address_of

if TYPE_CHECKING:
    from lowtide.runtime.segment import Call

_SAMPLES = 4


def sample_of(tensor: torch.Tensor | None, any_device: bool = False) -> list[float] | None:
    """A few values of a CPU tensor, where reading them stops nothing: a spot check against silent drift."""
    if tensor is None or address_of(tensor) == 0 or not tensor.is_floating_point():
        return None
    if not (tensor.is_cpu or any_device) or tensor.is_meta:
        return None
    row = tensor.view(-1) if tensor.is_contiguous() else _one_row(tensor)
    return row[:: max(1, row.numel() // _SAMPLES)].tolist()


def compare(call: "Call", values: list[Any], extra: int, weights: set[int] | None) -> None:
    """ReplayError where the replay's saved tensors are not those of the forward.

    values: tensors, or what stands for one (see selective.py). extra: tensors saved past the recorded end. weights:
    addresses of the block's weights; None where weights may move.
    """
    if not call.compared:
        return
    count = len(values) + (extra if call.complete else 0)
    if count != len(call.facts):
        raise mismatch(call, f"it saved {len(call.facts)} tensors in forward and {count} on recomputation")
    facts = [(value.shape, value.dtype, value.device) for value in values]
    if facts != call.facts:
        number = next(i for i, (old, new) in enumerate(zip(call.facts, facts, strict=True)) if old != new)
        was, now = _told(call.facts[number]), _told(facts[number])
        raise mismatch(call, f"saved tensor {number} was {was} in forward, {now} on recomputation")
    if weights is not None:
        _compare_weights(call, values, weights)
    for number, old in call.samples.items():
        new = sample_of(values[number], any_device=True)
        if _drifted(old, new, values[number].dtype):
            raise mismatch(call, f"values of saved tensor {number} differ: {old} in forward, {new} on recomputation")


def _compare_weights(call: "Call", values: list[Any], weights: set[int]) -> None:
    for value, (address, version) in zip(values, call.places, strict=True):
        now = address_of(value)
        if now not in weights or (now == address and value._version == version):
            continue
        if value._version != version or call.weights_may_move is None or not call.weights_may_move():
            raise ReplayError(
                f"{call.name}: a weight of shape {tuple(value.shape)} was exchanged or modified by an inplace "
                "operation between forward and backward, so the recomputation would use other values. Step the "
                "optimizer, load or swap weights after backward."
            )


def mismatch(call: "Call", what: str) -> ReplayError:
    """The error for a replay that is not what its forward was (rule 13)."""
    return ReplayError(
        f"recomputing {call.name} did not give what its forward saved: {what}. Likely causes: a counter, batch "
        "norm or cache that moves at every call; train()/eval() or weights changed before backward; a context "
        "manager that has ended; random numbers from a generator hidden in the block; routing that flips on ties."
    )


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1:
        tensor = tensor[-1]
    return tensor.reshape(-1)


def _drifted(old: list[float] | None, new: list[float] | None, dtype: torch.dtype) -> bool:
    if old is None or new is None or old == new:
        return False
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    scale = max((abs(value) for value in old if math.isfinite(value)), default=0.0)
    return any(
        not (abs(a - b) <= tolerance * scale) and not (math.isnan(a) and math.isnan(b)) and a != b
        for a, b in zip(old, new, strict=True)
    )


def _told(fact: tuple[Any, ...]) -> str:
    return f"{tuple(fact[0])} {str(fact[1]).removeprefix('torch.')} on {fact[2]}"
