"""Every way to attach, and one observed step in each."""

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

import lowtide
from lowtide import families
from lowtide.measure.calls import counted_forwards
from lowtide.measure.parity import Difference, compare, run_step
from lowtide.plan.held import Held, predict
from lowtide.plan.schedule import FFN, SELECTIVE, WHOLE, Schedule, StackSchedule, mixed
from lowtide.runtime.receipt import Receipt
from lowtide.runtime.resolve import ResolvedStack
from lowtide.testing import cpu_offload
from tests.contract.cases import SEED, Case, first_forward, make_case, plain_step, trace_of
from tests.contract.observed import Observer

SETTINGS: dict[str, dict[str, int]] = {
    "1": {"interval": 1},
    "2": {"interval": 2},
    "3": {"interval": 3},
    "2of4": {"interval": 2, "segment_stride": 4},
}
TREATED = {
    "torch": WHOLE,
    "torch-ffn": FFN,
    "unsloth": WHOLE,
    "unsloth-ffn": FFN,
    "torch-selective": SELECTIVE,
    "unsloth-selective": SELECTIVE,
}
"""What a backend makes of the blocks that it treats, said again in the words of the documentation."""

OFFLOADS = tuple(backend for backend in TREATED if backend.startswith("unsloth"))
MIXED = ("ffn+boundary+attention", "selective+boundary", "kept+saved", "ffn+saved", "selective+attention", "kept")
"""Treatments of neighbouring blocks in the explicit schedule, over and over."""


@dataclass(frozen=True)
class Mode:
    """One way to attach. backend: None, one of TREATED, or "mixed", an explicit schedule. setting: of SETTINGS."""

    backend: str | None
    setting: str = "1"
    offload_attention: bool = False

    def __str__(self) -> str:
        words = [str(self.backend), self.setting if self.backend in TREATED else ""]
        return "-".join(word for word in [*words, "attention" if self.offload_attention else ""] if word)

    @property
    def intervals(self) -> dict[str, int]:
        return SETTINGS[self.setting] if self.backend in TREATED else {}

    def options(self, stacks: list[ResolvedStack]) -> dict[str, Any]:
        """Keyword arguments of ``attach``, without a smallest size of what is moved."""
        if self.backend == "mixed":
            return {"schedule": Schedule({stack.name: _mixed(stack) for stack in stacks}), "offload_min_bytes": 0}
        options = {"backend": self.backend, "offload_attention": self.offload_attention, "offload_min_bytes": 0}
        return {**options, **self.intervals}


def _mixed(stack: ResolvedStack) -> StackSchedule:
    return mixed([MIXED[index % len(MIXED)] for index in range(len(stack.blocks))])


BACKENDS = [Mode(backend, setting) for backend in TREATED for setting in SETTINGS]
ATTENTION = [
    Mode(None, offload_attention=True),
    *(Mode(backend, setting, True) for backend in ("torch", "torch-ffn", "unsloth-ffn") for setting in ("1", "2of4")),
    Mode("unsloth", "2of4", True),
    Mode("torch-selective", "1", True),
    Mode("torch-selective", "2of4", True),
]
ALL = [*BACKENDS, *ATTENTION, Mode("mixed")]
FEW = [
    Mode("torch", "2"),
    Mode("torch-ffn"),
    Mode("unsloth"),
    Mode("unsloth-ffn", "2of4", offload_attention=True),
    Mode("torch-selective", "2of4"),
    Mode("unsloth-selective", "2"),
    Mode(None, offload_attention=True),
]
"""For training that differs in what needs a gradient only."""


@dataclass(frozen=True)
class Observation:
    """What a step in one mode did.

    schedule: what the handle made of the mode. in_forward, again: by block, how often its treated side ran. kernels,
    plain_kernels: attention kernels that ran, and in the step without lowtide. out_bytes, back_bytes: copied to CPU
    memory and back. freed_bytes: by how much less was alive when forward was over than without lowtide.
    plain_left_bytes, left_bytes: made in forward and still alive after the step, without and with lowtide.
    tables_bytes: that the model made in its first forward, and keeps.
    """

    case: Case
    mode: Mode
    training: str
    schedule: Schedule
    differences: tuple[Difference, ...]
    in_forward: dict[str, int]
    again: dict[str, int]
    kernels: int
    plain_kernels: int
    out_bytes: int
    back_bytes: int
    freed_bytes: int
    plain_left_bytes: int
    left_bytes: int
    tables_bytes: int
    receipt: Receipt
    held: Held

    def recomputed_blocks(self) -> set[str]:
        """Blocks that are recomputed, in whole or in part, in the prediction."""
        inside = {name for segment in self.held.segments for name in segment}
        return {
            name
            for name, _ in self.case.blocks()
            if any(part == name or part.startswith(f"{name}.") for part in inside)
        }


def observe(key: str, mode: Mode, training: str = "full") -> Observation:
    """One step in a mode, with what is known of the same step without lowtide."""
    case, first = _shared_case(key, training)
    plain, seen_plain, tables_bytes = plain_step(key, training)
    in_forward: dict[str, int] = {}
    with (
        cpu_offload(),
        counted_forwards(treated_sides(case, mode)) as forwards,
        lowtide.attach(case.model, **mode.options(case.stacks)) as handle,
        Observer(case.model, first) as seen,
    ):

        def forward_is_over() -> None:
            seen.forward_is_over()
            in_forward.update(forwards)

        step = run_step(case.model, case.inputs, SEED, after_forward=forward_is_over)
        receipt = handle.receipt()
    case.model.zero_grad(set_to_none=True)
    return Observation(
        case=case,
        mode=mode,
        training=training,
        schedule=handle.schedule,
        differences=tuple(compare(plain, step)),
        in_forward=in_forward,
        again={name: count - in_forward[name] for name, count in forwards.items()},
        kernels=seen.kernels,
        plain_kernels=seen_plain.kernels,
        out_bytes=seen.out_bytes,
        back_bytes=seen.back_bytes,
        freed_bytes=seen_plain.alive_bytes - seen.alive_bytes,
        plain_left_bytes=seen_plain.left_bytes,
        left_bytes=seen.left_bytes,
        tables_bytes=tables_bytes,
        receipt=receipt,
        held=predict(trace_of(key, training), handle.schedule, 0),
    )


@functools.lru_cache(maxsize=1)
def _shared_case(key: str, training: str) -> tuple[Case, Observer]:
    """One model for all modes of a row, one after another: building it costs as much as a step."""
    case = make_case(families.find(key), training)
    return case, first_forward(case.model, case.inputs)


def treated_sides(case: Case, mode: Mode) -> list[tuple[str, nn.Module]]:
    """By block, the module whose forward runs once more for each recomputation of the block's treated side."""
    sides = []
    for stack in case.stacks:
        for index, (name, block) in enumerate(stack.blocks):
            word = MIXED[index % len(MIXED)] if mode.backend == "mixed" else TREATED.get(mode.backend or "", "")
            if word.startswith(FFN):
                sides += [(name, chain[0][1]) for chain in stack.chains(block)[:1]]
            else:
                sides.append((name, block))
    return sides


def expected_treatments(case: Case, mode: Mode) -> dict[str, str]:
    """The treatment of every block, said again in the words of the documentation."""
    found = {}
    for stack in case.stacks:
        for index, (name, block) in enumerate(stack.blocks):
            if mode.backend == "mixed":
                treatment = MIXED[index % len(MIXED)].partition("+")[0]
            else:
                treatment = TREATED[mode.backend] if mode.backend and _is_chosen(index, mode) else "kept"
            found[name] = treatment if treatment != FFN or stack.chains(block) else "kept"
    return found


def _is_chosen(index: int, mode: Mode) -> bool:
    interval, stride = mode.intervals["interval"], mode.intervals.get("segment_stride")
    if stride is not None:
        return index % stride < interval
    return TREATED[mode.backend or ""] != FFN or index % interval == 0
