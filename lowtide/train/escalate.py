"""``on_out_of_memory`` = ``escalate``: a batch that runs out of memory is repeated with a setting that needs less.

Nothing else may tell that it failed. Rules:
1. Only torch.OutOfMemoryError of a forward or backward is caught. An update of the weights that fails half-way cannot
   be repeated, and keeps no activations.
2. The error lets go of its tracebacks, whoever keeps the error: their frames hold the graph. So does autograd's queue,
   until its next backward.
3. Gradients of earlier batches of the step wait in CPU memory, so that a repetition costs no memory where it is scarce.
4. A rung is taken only if its predicted peak is lower than that of the setting that failed, so the ladder ends.
5. What is predicted is traced on the meta device, which takes no memory: what failed is still there meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import families
from lowtide.attaching import attach
from lowtide.auto.handle import AutoHandle
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.handle import Attachment, Handle
from lowtide.measure.held import trace_held
from lowtide.measure.meta_copy import casting_as, on_meta, shapes_of
from lowtide.plan.held import HeldTrace
from lowtide.plan.schedule import IN_SEGMENTS
from lowtide.runtime.link import can_offload
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.train.cache import Cached
from lowtide.train.config import TrainConfig, TrainKeys
from lowtide.train.families.base import Denoiser
from lowtide.train.flow import random_noise
from lowtide.train.kernels import computing
from lowtide.train.loop import Updater, load_batch
from lowtide.train.memory import give_back
from lowtide.train.report import setting_name
from lowtide.train.resume import RunState
from lowtide.train.settings import most_bytes, most_bytes_under, short_keys
from lowtide.units import format_bytes

_MOST_PLANNED_ANEW = 3
_WHAT_TO_DO = (
    "What is left: a smaller train_batch_size (with more gradient_accumulation_steps a step still sees as many "
    "pictures), a smaller resolution or lora_rank, or more free memory on the device. The same command goes on from "
    "the last checkpoint."
)


class Attached(Attachment):
    """The model of a run under the setting that it has come to. A context manager, after which it is detached."""

    def __init__(self, model: nn.Module, family: str, config: CheckpointConfig) -> None:
        self.model = model
        self.family = family
        self.config = config
        self.handle = self._attach()

    @property
    def name(self) -> str:
        return _name(self.config)

    def change(self, config: CheckpointConfig) -> None:
        """Go on with another setting."""
        self.handle.detach()
        self.config = config
        self.handle = self._attach()

    def _attach(self) -> Handle | AutoHandle:
        return attach(self.model, family=self.family, **self.config.attach_arguments())

    def detach(self) -> None:
        self.handle.detach()


@dataclass(frozen=True)
class Rung:
    """A setting, and what it holds at most by prediction: activations between forward and backward, and the largest
    piece that is recomputed at once."""

    config: CheckpointConfig
    peak_bytes: int

    def __str__(self) -> str:
        return f"{_name(self.config)} ({format_bytes(self.peak_bytes)})"


@dataclass(frozen=True)
class Escalation:
    """The guard of a run's batches (see train.loop): repeats one that ran out of memory, a rung further down.

    state: is told of it. say: tells people.
    """

    attached: Attached
    denoiser: Denoiser
    updater: Updater
    cached: Cached
    keys: TrainKeys
    state: RunState
    say: Callable[[str], None]

    def __call__(self, attempt: Callable[[], float], indices: tuple[int, ...]) -> float:
        before = Before(self.updater)
        while True:
            try:
                return attempt()
            except (torch.OutOfMemoryError, ConfigError) as error:
                if isinstance(error, ConfigError) and not any(self._planned_anew[-1:]):
                    raise  # where auto has planned anew, that nothing fits any more is one more failure
                anew = isinstance(error, torch.OutOfMemoryError) and self._note_in_auto()
                failed_bytes = self._failed_bytes(indices) if anew else None
                found = None if anew else self._next(indices, error)
                if found is None and not anew:
                    raise
                _drop_frames(error)
            before.put_back()
            torch.zeros((), requires_grad=True).backward()  # rule 2: the queue forgets what a failed backward left
            give_back(self.updater.device)
            if found is None:
                self._plan_anew(failed_bytes)
            else:
                self._go_on(*found)

    def _note_in_auto(self) -> bool:
        """Whether auto has a schedule that takes less, and has not failed too often in this step."""
        handle = self.attached.handle
        often = sum(self._planned_anew) >= _MOST_PLANNED_ANEW
        if not isinstance(handle, AutoHandle) or handle.plan is None or often:
            return False
        return handle.note_out_of_memory()

    @property
    def _planned_anew(self) -> list[bool]:
        """Of each time that memory ran out in this step: whether auto planned anew, or a setting by name followed."""
        failures = [entry for entry in self.state.out_of_memory if entry["step"] == self.state.step + 1]
        return [entry["next"] == entry["failed"] for entry in failures]

    def _shapes(self, indices: tuple[int, ...]) -> tuple[list[ResolvedStack], HeldTrace]:
        return trace_shapes(self.attached, self._arguments(indices), self.keys, self.updater.device)

    def _failed_under(self, trace: HeldTrace) -> int:
        """The most that activations were to take under what ran, as of every rung."""
        return most_bytes_under(self.attached.handle.schedule, trace, self.attached.config.offload_min_bytes)

    def _failed_bytes(self, indices: tuple[int, ...]) -> int | None:
        """The same; None where no shapes say it."""
        try:
            return self._failed_under(self._shapes(indices)[1])
        except ConfigError:
            return None

    def _plan_anew(self, failed_bytes: int | None) -> None:
        name, step = self.attached.name, self.state.step + 1
        self.state.out_of_memory.append(
            {"step": step, "failed": name, "failed_bytes": failed_bytes, "next": name, "next_bytes": None}
        )
        self.say(
            f"step {step}: out of memory with {name}{_in_brackets(failed_bytes)}. The batch is repeated, planned anew "
            "for less: same numbers. In brackets: the most that activations were to take"
        )

    def _next(self, indices: tuple[int, ...], error: Exception) -> tuple[Rung, Rung] | None:
        """The setting that failed and the next one; None, with the reason in the error's notes, if there is none."""
        try:
            stacks, trace = self._shapes(indices)
        except ConfigError as problem:
            error.add_note(
                f"No other setting was tried, for their memory cannot be predicted: {problem}. {_WHAT_TO_DO}"
            )
            return None
        config, can_move = self.attached.config, can_offload(self.updater.device)
        failed = Rung(config, self._failed_under(trace))
        rungs = [Rung(other, most_bytes(other, stacks, trace)) for other in ladder(config, stacks, can_move)]
        lower = next((rung for rung in rungs if rung.peak_bytes < failed.peak_bytes), None)
        if lower is None:
            error.add_note(self._exhausted(failed, rungs))
            return None
        return failed, lower

    def _go_on(self, failed: Rung, rung: Rung) -> None:
        self.attached.change(rung.config)
        step = self.state.step + 1
        self.state.setting = rung.config.as_flat_dict()
        self.state.out_of_memory.append(
            {
                "step": step,
                "failed": _name(failed.config),
                "failed_bytes": failed.peak_bytes,
                "next": _name(rung.config),
                "next_bytes": rung.peak_bytes,
            }
        )
        self.say(
            f"step {step}: out of memory with {failed}. The batch is repeated, and the run goes on, with {rung}: same "
            "numbers, more computation. In brackets: the most that activations take, by prediction"
        )

    def _exhausted(self, failed: Rung, rungs: Sequence[Rung]) -> str:
        earlier = [f"{entry['failed']}{_in_brackets(entry['failed_bytes'])}" for entry in self.state.out_of_memory]
        tried = ", ".join((*earlier, str(failed)))
        return (
            f"Step {self.state.step + 1}: no setting of checkpointing is left. Tried: {tried}. None of the others "
            f"needs less by prediction: {', '.join(map(str, rungs))}. {_WHAT_TO_DO}"
        )

    def _arguments(self, indices: tuple[int, ...]) -> dict[str, Any]:
        """Of the denoiser's forward, on the CPU: noise that nobody learns from has the same shape."""
        batch = load_batch(self.cached, indices, torch.device("cpu"))
        noised = random_noise(self.denoiser, batch.latents, torch.Generator())
        return self.denoiser.arguments(noised.latents, noised.sigmas, batch.text)


class Before:
    """Gradients and random states as they were before a batch."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._random = updater.random_states()
        self._gradients = [_on_cpu(parameter.grad) for parameter in updater.parameters]

    def put_back(self) -> None:
        self._updater.restore_random(self._random)
        for parameter, gradient in zip(self._updater.parameters, self._gradients, strict=True):
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.copy_(gradient)


def ladder(config: CheckpointConfig, stacks: Sequence[ResolvedStack], can_offload: bool) -> Iterator[CheckpointConfig]:
    """The settings that may follow ``config``, in the order in which they cost time: feed-forward sides, whole blocks,
    whole blocks whose inputs wait in CPU memory, and the same in narrower segments."""
    width = min(config.interval or 1, max(len(stack.blocks) for stack in stacks)) if config.scope in IN_SEGMENTS else 1

    def rung(backend: str, interval: int = 1, offload_attention: bool = False) -> CheckpointConfig:
        alike = (config.offload_pin_memory_max_buckets, config.offload_min_bytes)
        return CheckpointConfig.for_attach(backend, interval if interval > 1 else None, None, offload_attention, *alike)

    if any(stack.has_feed_forward for stack in stacks):
        yield rung("torch-ffn", offload_attention=config.offload_attention)
    yield rung("torch", width)
    if can_offload:
        yield rung("unsloth", width)
    while width > 1:
        width //= 2
        yield rung("unsloth" if can_offload else "torch", width)


def setting_of(state: RunState, config: TrainConfig, model: nn.Module, say: Callable[[str], None]) -> CheckpointConfig:
    """What a run starts with: what its earlier part has come to when memory ran out, or what its keys say."""
    if not state.setting:
        return config.checkpointing
    setting = CheckpointConfig(**state.setting)
    if setting.moves and not can_offload(next(model.parameters()).device):
        return config.checkpointing  # it has come to a machine without an accelerator
    say(f"checkpointing: {_name(setting)}, for memory ran out with {_name(config.checkpointing)}")
    return setting


def trace_shapes(
    attached: Attached, arguments: Mapping[str, Any], keys: TrainKeys, device: torch.device
) -> tuple[list[ResolvedStack], HeldTrace]:
    """What a plain forward with these arguments would save on the device; takes no memory there.

    Raises ConfigError where the model's forward cannot run on the meta device.
    """
    model = on_meta(attached.model)
    stacks = resolve(model, families.find(attached.family).stacks)
    with computing(keys.mixed_precision, device), casting_as(device):
        return stacks, trace_held(model, stacks, shapes_of(arguments))


def _in_brackets(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f" ({format_bytes(size_bytes)})"


def _on_cpu(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to("cpu", copy=True)


def _drop_frames(error: BaseException) -> None:
    """Rule 2. Clearing the frames is not enough: their functions hold closures."""
    errors = [error]
    for one in errors:
        one.__traceback__ = None
        linked = (one.__cause__, one.__context__)
        errors += [other for other in linked if other is not None and other not in errors]


def _name(config: CheckpointConfig) -> str:
    return setting_name(short_keys(config))
