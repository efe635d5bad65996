"""One run, from its configuration to its report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.auto.budget import budget_bytes
from lowtide.controls import CheckpointConfig
from lowtide.plan.explain import of_few_tokens
from lowtide.plan.schedule import Schedule
from lowtide.runtime.link import accelerator_or_simulated
from lowtide.train.adapters import Everything, Lora, Trained
from lowtide.train.alone import alone_in
from lowtide.train.config import ESCALATE, TrainConfig, TrainKeys
from lowtide.train.dataset import batches
from lowtide.train.escalate import Attached, Escalation, setting_of
from lowtide.train.families.base import Denoiser
from lowtide.train.files import folder_with_something, new_folder, write_json
from lowtide.train.flow import Batch, fixed_loss, random_noise
from lowtide.train.kernels import computing
from lowtide.train.loop import Guard, Interrupt, StepDone, Updater, check_loss, load_batch, plainly, run_steps
from lowtide.train.memory import give_back, in_words, peak_bytes
from lowtide.train.metrics import add_metrics, read_metrics, summary_of
from lowtide.train.plans import (
    TEXT_TOKENS,
    TRAINED_PARAMETERS,
    check_that_it_can_run,
    check_that_it_is_for,
    save_what_auto_found,
    tell_what_differs,
)
from lowtide.train.prepare import Prepared, prepare
from lowtide.train.progress import Reporter, told
from lowtide.train.report import REPORT, WEIGHTS, compare_blocks
from lowtide.train.resume import RunState, read_tensors, save_checkpoint
from lowtide.train.samples import AFTER, BEFORE, write_pair, write_sample
from lowtide.train.settings import compare_settings, recomputed_blocks
from lowtide.train.start import begin

_FIXED_EXAMPLES = 8


@dataclass(frozen=True)
class Session:
    """A run that is being trained. fixed: the batches on which learning is measured."""

    prepared: Prepared
    denoiser: Denoiser
    trained: Trained
    updater: Updater
    state: RunState
    fixed: list[Batch]

    @property
    def keys(self) -> TrainKeys:
        return self.prepared.config.keys

    @property
    def of_plans(self) -> dict[str, str]:
        """What plans say of a run, and none of its keys."""
        trained = sum(weight.numel() for weight in self.trained.parameters)
        tokens = self.prepared.row.tokens_of(self.keys.tokenizer_max_length)
        return {TRAINED_PARAMETERS: str(trained), TEXT_TOKENS: str(tokens)}

    @property
    def most_tokens(self) -> int:
        """That a block has, of any picture."""
        text = int(self.of_plans[TEXT_TOKENS])
        return max(self.denoiser.tokens(size, text) for size in self.prepared.cached.buckets)

    def fixed_loss(self) -> float:
        with computing(self.keys.mixed_precision, self.prepared.device):
            return fixed_loss(self.denoiser, self.fixed)


def run(config: TrainConfig, reporter: Reporter) -> dict[str, Any] | None:
    """Train, or go on training; the report, or None where an interrupt stopped it at a checkpoint.

    Raises ConfigError before anything is written, MachineError where the disk or the device failed, LowtideError where
    training broke down.
    """
    planned = config.checkpointing.planned()
    if config.checkpointing.moves:
        accelerator_or_simulated()  # raises now what attach would raise after everything is cached
    if planned is not None and planned.moves_anything:
        check_that_it_can_run(config.checkpointing.schedule)
    if config.checkpointing.is_auto:
        budget_bytes(config.checkpointing.vram_budget)
    prepared = prepare(config, reporter)
    _tell_smaller_batches(prepared, reporter.say)
    output = config.keys.output
    with folder_with_something(output), alone_in(output, "output_dir"):
        return _run(prepared, planned, reporter)


def _run(prepared: Prepared, planned: Schedule | None, reporter: Reporter) -> dict[str, Any] | None:
    config = prepared.config
    state, checkpoint = begin(config, prepared.cached.digest, reporter)
    session = _open(prepared, state, checkpoint)
    if planned is not None:
        check_that_it_is_for(session.denoiser, config, planned)
        tell_what_differs(config, session.of_plans, reporter.say)
    if state.loss_before is None:
        state.loss_before = session.fixed_loss()
        _sample(session, BEFORE)
    setting = setting_of(state, config, session.denoiser.model, reporter.say)
    if prepared.device.type != "cpu":
        _tell_few_tokens(session, setting, reporter.say)
        give_back(prepared.device)  # what encoders and a sample took is no part of what steps take
    with told(reporter.say), Attached(session.denoiser.model, config.keys.family, setting) as attached:
        _train(session, attached, reporter)
        blocks = recomputed_blocks(attached.handle.stacks, attached.handle.schedule)
    if state.step < config.keys.max_train_steps:
        return None
    return _finish(session, attached, compare_blocks(blocks, state.receipt))


def _tell_few_tokens(session: Session, setting: CheckpointConfig, say: Callable[[str], None]) -> None:
    if setting.scope is not None or setting.moves:
        for line in of_few_tokens(session.most_tokens):
            say(line)


def _tell_smaller_batches(prepared: Prepared, say: Callable[[str], None]) -> None:
    """A batch has pictures of one size: there may be too few of any."""
    wanted, most = prepared.config.keys.train_batch_size, max(Counter(prepared.cached.buckets).values())
    if most < wanted:
        say(f"Batches hold {most} at most, not {wanted} (train_batch_size): there are no more pictures of one size.")


def _open(prepared: Prepared, state: RunState, checkpoint: Path | None) -> Session:
    keys, row = prepared.config.keys, prepared.row
    torch.manual_seed(keys.seed)
    denoiser = row.open_denoiser(keys.pipeline, prepared.device, prepared.dtype)
    if keys.model_type == "lora":
        trained = Lora(denoiser, row.lora_targets, keys.lora_rank, keys.lora_alpha)
    else:
        trained = Everything(denoiser)
    updater = Updater(trained.parameters, keys, prepared.device)
    if checkpoint is not None:
        trained.load(checkpoint)
        updater.restore(read_tensors(checkpoint))
    return Session(prepared, denoiser, trained, updater, state, _fixed_batches(prepared))


def _fixed_batches(prepared: Prepared) -> list[Batch]:
    """The first examples, each once, in batches as training has them."""
    cached, keys = prepared.cached, prepared.config.keys
    count = min(_FIXED_EXAMPLES, len(cached.buckets))
    chosen, indices = [], batches(cached.buckets[:count], keys.train_batch_size, seed=0)
    while sum(map(len, chosen)) < count:
        chosen.append(next(indices))
    return [load_batch(cached, batch, prepared.device) for batch in chosen]


def _sample(session: Session, name: str) -> None:
    if not session.keys.validation_disable:
        write_sample(session.denoiser, session.prepared.cached, session.keys, name)


def _train(session: Session, attached: Attached, reporter: Reporter) -> None:
    """All steps that are left, with a checkpoint now and then and at the end, also at an early one."""
    keys, state, device = session.keys, session.state, session.prepared.device
    saved_step = state.step

    def save() -> None:
        state.receipt = attached.handle.receipt().as_dict()
        write()

    def write() -> None:
        nonlocal saved_step
        tensors = session.updater.states()
        save_checkpoint(keys.output, state, session.trained, tensors, keys.checkpoints_total_limit)
        saved_step = state.step

    def before_failing() -> None:
        if state.step > saved_step:
            write()
            reporter.say(f"step {state.step + 1} failed; what was learnt is in {keys.output}/checkpoint-{state.step}")

    def after_step(done: StepDone) -> None:
        memory_bytes = peak_bytes(device)
        add_metrics(keys.output, done.step, done.loss, done.seconds, memory_bytes, attached.name)
        bar.show(done, in_words(memory_bytes, device))
        if done.step % keys.checkpoint_step_interval == 0:
            save()

    with Interrupt(reporter.say).listen() as interrupt, reporter.steps(state.step, keys.max_train_steps) as bar:
        guard = _guard(session, attached, reporter)
        cached = session.prepared.cached
        run_steps(session.denoiser, session.updater, cached, keys, state, after_step, interrupt, guard, before_failing)
        if state.step > saved_step:
            save()


def _guard(session: Session, attached: Attached, reporter: Reporter) -> Guard:
    if session.keys.on_out_of_memory != ESCALATE:
        return plainly
    cached = session.prepared.cached
    return Escalation(attached, session.denoiser, session.updater, cached, session.keys, session.state, reporter.say)


def _finish(session: Session, attached: Attached, blocks: dict[str, Any]) -> dict[str, Any]:
    """Weights, sample and report."""
    keys, state = session.keys, session.state
    before, after = state.loss_before, session.fixed_loss()
    check_loss(after, "after the last step")
    weights = keys.output / WEIGHTS[keys.model_type]
    with new_folder(weights) as partial:
        session.trained.save(partial)
    _sample(session, AFTER)
    pair = write_pair(keys.output)
    assert before is not None
    found = save_what_auto_found(keys, session.of_plans, attached.handle)
    report = {
        "lowtide": lowtide.__version__,
        "torch": torch.__version__,
        "device": session.prepared.device.type,
        "config": state.config,
        "steps": state.step,
        "fixed_batch_loss": {"before": before, "after": after, "improvement": 1 - after / before},
        "summary": summary_of(read_metrics(keys.output)),
        "recomputed_blocks": blocks,
        "receipt": state.receipt,
        "settings": _settings(session, attached),
        "checkpointing": attached.name,
        "out_of_memory": state.out_of_memory,
        "files": {"weights": str(weights), **({"sample": str(pair)} if pair else {}), **found},
    }
    write_json(keys.output / REPORT, report)
    return report


def _settings(session: Session, attached: Attached) -> list[dict[str, Any]] | None:
    """The table of settings, or None where a plain forward does not fit on the device."""
    batch, keys = _largest(session.prepared), session.keys
    noised = random_noise(session.denoiser, batch.latents, torch.Generator().manual_seed(keys.seed))
    try:
        with computing(keys.mixed_precision, session.prepared.device):
            return compare_settings(
                session.denoiser, keys.family, noised, batch, attached.config, attached.handle.schedule
            )
    except torch.OutOfMemoryError:
        return None


def _largest(prepared: Prepared) -> Batch:
    """The batch with the most pixels of those that this data gives."""
    cached, wanted = prepared.cached, prepared.config.keys.train_batch_size
    sizes = Counter(cached.buckets)
    bucket = max(sizes, key=lambda size: size[0] * size[1] * min(wanted, sizes[size]))
    members = [index for index, size in enumerate(cached.buckets) if size == bucket]
    return load_batch(cached, tuple(members[:wanted]), prepared.device)
