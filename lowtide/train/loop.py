"""The training loop: one update after another, from wherever the run stands."""

import functools
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from lowtide.errors import ConfigError, LowtideError
from lowtide.signals import handled
from lowtide.train.cache import Cached
from lowtide.train.config import TrainKeys
from lowtide.train.dataset import batches
from lowtide.train.families.base import Denoiser
from lowtide.train.flow import Batch, loss_of, random_noise
from lowtide.train.kernels import computing
from lowtide.train.resume import RunState

Guard = Callable[[Callable[[], float], tuple[int, ...]], float]
"""Calls what learns from one batch, given with the indices of its examples, and returns its loss."""


@dataclass(frozen=True)
class StepDone:
    """One update. loss: mean over its batches. step: counts from 1. seconds: of the update."""

    step: int
    loss: float
    seconds: float


class Interrupt:
    """Ctrl-C or a polite kill while a run is on: the first asks to stop after the step, the next stops at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say

    @contextmanager
    def listen(self) -> Iterator["Interrupt"]:
        with handled(self._ask, signal.SIGINT, signal.SIGTERM):
            yield self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._say("stopping after this step; Ctrl-C again stops at once")
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Updater:
    """Optimizer, learning-rate schedule and random states: all that changes in an update but the weights."""

    def __init__(self, parameters: list[nn.Parameter], keys: TrainKeys, device: torch.device) -> None:
        self.parameters = parameters
        self.device = device
        self._max_norm = keys.max_grad_norm
        self._learning_rate = keys.learning_rate
        self.noise = torch.Generator().manual_seed(keys.seed)
        self._optimizer = torch.optim.AdamW(parameters, lr=keys.learning_rate)
        self._scheduler = get_scheduler(
            keys.lr_scheduler,
            self._optimizer,
            num_warmup_steps=keys.lr_warmup_steps,
            num_training_steps=keys.max_train_steps,
        )

    def update(self) -> None:
        if self._max_norm:
            nn.utils.clip_grad_norm_(self.parameters, self._max_norm)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            **self.random_states(),
        }

    def restore(self, states: dict[str, Any]) -> None:
        """Put back what ``states`` gave. A learning rate that was changed since holds from here on."""
        self._optimizer.load_state_dict(states["optimizer"])
        self._scheduler.load_state_dict(states["scheduler"])
        self._begin_at(self._learning_rate)
        self.restore_random(states)

    def _begin_at(self, learning_rate: float) -> None:
        """What the schedule multiplies."""
        schedule = self._scheduler
        if schedule.base_lrs == [learning_rate]:
            return
        schedule.base_lrs = [learning_rate]
        (group,), (factor,) = self._optimizer.param_groups, schedule.lr_lambdas
        group["initial_lr"] = learning_rate
        group["lr"] = learning_rate * factor(schedule.last_epoch)
        schedule._last_lr = [group["lr"]]

    def random_states(self) -> dict[str, Any]:
        states = {"noise": self.noise.get_state(), "cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            states["device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        return states

    def restore_random(self, states: dict[str, Any]) -> None:
        """Put back what ``random_states`` gave."""
        self.noise.set_state(states["noise"])
        torch.set_rng_state(states["cpu"])
        if "device" in states and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states["device"], self.device)


def plainly(attempt: Callable[[], float], indices: tuple[int, ...]) -> float:
    """The guard that guards against nothing."""
    return attempt()


def _nothing() -> None:
    pass


def run_steps(
    denoiser: Denoiser,
    updater: Updater,
    cached: Cached,
    keys: TrainKeys,
    state: RunState,
    after_step: Callable[[StepDone], None],
    interrupt: Interrupt,
    guard: Guard = plainly,
    before_failing: Callable[[], None] = _nothing,
) -> None:
    """Train from ``state.step`` to ``max_train_steps``, or until an interrupt is asked for; ``state`` goes along.

    guard: every forward and backward goes through it. before_failing: is called where one of them ran out of memory, or
    has no plan that fits; all is as after the last update then.
    Raises LowtideError where the loss is no number any more: the weights are then lost, the checkpoints are not.
    """
    denoiser.model.train()
    order = batches(cached.buckets, keys.train_batch_size, keys.seed, skip=state.batches)
    while state.step < keys.max_train_steps and not interrupt.asked:
        start = time.perf_counter()
        losses, random = [], updater.random_states()
        try:
            for _ in range(keys.gradient_accumulation_steps):
                indices = next(order)
                losses.append(guard(functools.partial(_learn, denoiser, updater, cached, keys, indices), indices))
        except (torch.OutOfMemoryError, ConfigError):
            updater.restore_random(random)
            before_failing()
            raise
        mean = _mean(losses, state.step + 1)
        updater.update()
        state.step += 1
        state.batches += keys.gradient_accumulation_steps
        after_step(StepDone(state.step, mean, time.perf_counter() - start))


def _learn(denoiser: Denoiser, updater: Updater, cached: Cached, keys: TrainKeys, indices: tuple[int, ...]) -> float:
    """Forward and backward of one batch: its loss. Its share is added to the gradients."""
    batch = load_batch(cached, indices, updater.device)
    with computing(keys.mixed_precision, updater.device):
        noised = random_noise(denoiser, batch.latents, updater.noise)
        loss = loss_of(denoiser, noised, batch.text)
    (loss / keys.gradient_accumulation_steps).backward()
    return loss.item()


def load_batch(cached: Cached, indices: tuple[int, ...], device: torch.device) -> Batch:
    texts = [cached.load_text(index) for index in indices]
    text = {name: torch.stack([one[name] for one in texts]) for name in texts[0]}
    return Batch(torch.stack([cached.load_latents(index) for index in indices]), text).to(device)


def _mean(losses: list[float], step: int) -> float:
    mean = sum(losses) / len(losses)
    check_loss(mean, f"in step {step}")
    return mean


def check_loss(loss: float, when: str) -> None:
    """Raises LowtideError for one that is no number any more, or infinite."""
    if not math.isfinite(loss):
        raise LowtideError(
            f"the loss is {loss} {when}: training has broken down. Lower learning_rate, or set mixed_precision to no; "
            "the checkpoints saved before it can be gone on from"
        )
