"""A run that was stopped, in whatever way, goes on exactly: the same losses and weights as one that was not."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.train.config import TrainConfig
from lowtide.train.flow import loss_of
from lowtide.train.loop import StepDone
from lowtide.train.report import differently, finished

Train = Callable[..., dict[str, Any] | None]
Tell = Callable[..., tuple[dict[str, Any] | None, str]]
Losses = Callable[[Path], list[float]]
Numbers = Callable[[Path], Any]
STEPS = 5


class Crashed(Exception):
    """Stands for whatever kills a run."""


def stop_at(step: int, how: Callable[[], None]) -> Callable[[StepDone], None]:
    return lambda done: how() if done.step == step else None


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise Crashed


@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupt_stops_after_the_step_and_the_run_goes_on_exactly(
    train: Train, output: Path, numbers: Numbers, whole: Any, step: int
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert train(stop_at(step, interrupt), max_train_steps=STEPS) is None
    assert signal.getsignal(signal.SIGINT) is handler
    assert (output / f"checkpoint-{step}").is_dir() and not (output / "report.json").exists()
    report = train(max_train_steps=STEPS)
    assert report is not None
    assert numbers(output) == whole


def test_a_second_interrupt_stops_at_once(train: Train, output: Path) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        train(stop_at(1, twice))
    assert not list(output.glob("checkpoint-*"))


def test_after_a_crash_the_run_goes_on_from_the_last_checkpoint(
    train: Train, output: Path, losses: Losses, numbers: Numbers, whole: Any
) -> None:
    with pytest.raises(Crashed):
        train(stop_at(4, crash), max_train_steps=STEPS)
    assert len(losses(output)) == 4
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert train(max_train_steps=STEPS) is not None
    assert numbers(output) == whole


def test_what_was_learnt_before_memory_ran_out_is_saved(
    train_and_tell: Tell, output: Path, numbers: Numbers, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, calls = {"max_train_steps": STEPS, "checkpoint_step_interval": 100}, []

    def fourth_fails(*args: Any) -> torch.Tensor:
        """When its noise is drawn."""
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory left")
        return loss_of(*args)

    monkeypatch.setattr("lowtide.train.loop.loss_of", fourth_fails)
    with pytest.raises(torch.OutOfMemoryError):
        train_and_tell(**over)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-3"]
    report, said = train_and_tell(**over)
    assert report is not None and f"going on from {output}/checkpoint-3: 3 of {STEPS} steps are done" in said
    assert numbers(output) == whole


def test_a_run_that_has_more_steps_than_are_asked_for_says_so(train_and_tell: Tell, output: Path) -> None:
    assert train_and_tell(stop_at(3, interrupt), max_train_steps=STEPS)[0] is None
    report, said = train_and_tell(max_train_steps=2)
    assert report is not None and report["steps"] == 3
    assert "has 3 steps, and max_train_steps is 2: no step is left" in said


def test_a_crash_before_the_first_checkpoint_costs_only_its_steps(
    train: Train, output: Path, numbers: Numbers, whole: Any
) -> None:
    with pytest.raises(Crashed):
        train(stop_at(1, crash), max_train_steps=STEPS)
    assert train(max_train_steps=STEPS) is not None
    assert numbers(output) == whole
    assert not (output / "earlier-1").exists()


def test_a_finished_run_can_be_made_longer(train: Train, output: Path, numbers: Numbers, whole: Any) -> None:
    assert train(max_train_steps=3) is not None
    assert train(max_train_steps=STEPS) is not None
    assert numbers(output) == whole


@pytest.mark.parametrize("lr_scheduler", ["constant", "cosine"])
def test_another_learning_rate_holds_from_where_the_run_goes_on(
    train: Train, output: Path, numbers: Numbers, lr_scheduler: str
) -> None:
    keys: dict[str, Any] = {"lr_scheduler": lr_scheduler, "lr_warmup_steps": 1, "max_train_steps": 3}
    assert train(**keys) is not None
    then = numbers(output)
    with pytest.warns(UserWarning, match="its numbers are not those of an uninterrupted one"):
        assert train(**{**keys, "learning_rate": 0.0, "max_train_steps": STEPS}) is not None
    now = numbers(output)
    assert now.lora == then.lora
    assert now.losses[:3] == then.losses and len(now.losses) == STEPS


def test_full_training_goes_on_exactly(train: Train, output: Path, losses: Losses) -> None:
    keys = {"model_type": "full", "learning_rate": 1e-4, "max_train_steps": 3}
    assert train(**keys, output_dir=str(output / "whole")) is not None
    assert train(stop_at(2, interrupt), **keys) is None
    assert train(**keys) is not None
    assert losses(output) == losses(output / "whole")


def test_a_run_in_a_thread_leaves_signals_alone(train: Train, output: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen = []
    thread = threading.Thread(
        target=lambda: train(lambda done: seen.append(signal.getsignal(signal.SIGINT)), max_train_steps=1)
    )
    thread.start()
    thread.join()
    assert seen == [handler] and (output / "report.json").exists()


def test_a_broken_checkpoint_is_passed_over(train: Train, output: Path, numbers: Numbers, whole: Any) -> None:
    assert train(max_train_steps=4) is not None
    state = output / "checkpoint-4" / "training_state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=r"checkpoint-4 is broken \(training_state.pt: missing or not as written\)"):
        assert train(max_train_steps=STEPS) is not None
    assert numbers(output) == whole


@pytest.mark.filterwarnings("ignore:.* is broken:UserWarning")
def test_only_broken_checkpoints_are_an_error(train: Train, output: Path) -> None:
    assert train() is not None
    (output / "checkpoint-2" / "state.json").write_text("{")
    (output / "checkpoint-4" / "pytorch_lora_weights.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is broken.*resume_from_checkpoint=false"):
        train(max_train_steps=STEPS)
    assert (output / "checkpoint-2" / "training_state.pt").exists() and (output / "report.json").exists()


def test_a_checkpoint_by_name(train: Train, output: Path, numbers: Numbers, whole: Any) -> None:
    assert train(max_train_steps=STEPS) is not None
    assert train(max_train_steps=STEPS, resume_from_checkpoint="checkpoint-2") is not None
    assert numbers(output) == whole
    aside = output / "earlier-1"
    assert {path.name for path in aside.iterdir()} == {
        *("checkpoint-4", "checkpoint-5", "metrics.jsonl", "lora", "report.json")
    }
    assert [json.loads(line)["step"] for line in (aside / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"no checkpoint-3 in .*; there: checkpoint-5, checkpoint-4, checkpoint-2"):
        train(resume_from_checkpoint="checkpoint-3")


def test_another_adapter_is_refused(train: Train, output: Path) -> None:
    assert train(stop_at(2, interrupt)) is None
    with pytest.raises(ConfigError, match=r"checkpoint-2 was made with lora_rank 4 \(now 8\)"):
        train(lora_rank=8)


def test_other_numbers_are_a_warning(train: Train, output: Path) -> None:
    assert train(stop_at(2, interrupt)) is None
    with pytest.warns(UserWarning, match=r"made with learning_rate 0.003 \(now 0.001\): the run goes on"):
        assert train(learning_rate=1e-3) is not None


def test_other_pictures_are_a_warning(train: Train, photos: Path) -> None:
    assert train(stop_at(2, interrupt)) is None
    (photos / "cat.txt").write_text("a dog")
    with pytest.warns(UserWarning, match="other pictures or captions"):
        assert train(data_dir=str(photos)) is not None


def test_other_checkpointing_is_neither(train: Train, output: Path, numbers: Numbers, whole: Any) -> None:
    assert train(stop_at(2, interrupt), max_train_steps=STEPS) is None
    keys = {"gradient_checkpointing_backend": "torch-ffn", "gradient_checkpointing_interval": 1}
    assert train(max_train_steps=STEPS, **keys) is not None
    assert numbers(output) == whole


def test_only_the_newest_checkpoints_stay(train: Train, output: Path) -> None:
    assert train(checkpoint_step_interval=1, checkpoints_total_limit=2) is not None
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_a_finished_run_is_told_apart(train: Train, flat: dict[str, Any], output: Path) -> None:
    report = train()
    assert finished(TrainConfig.from_flat(flat)) == report
    assert finished(TrainConfig.from_flat({**flat, "max_train_steps": 6})) is None
    assert finished(TrainConfig.from_flat({**flat, "resume_from_checkpoint": False})) is None
    assert finished(TrainConfig.from_flat({**flat, "checkpoint_step_interval": 7})) == report
    other = TrainConfig.from_flat({**flat, "gradient_checkpointing_backend": "torch-ffn", "max_train_steps": 3})
    assert finished(other) == report  # its numbers are the same
    assert report is not None
    assert re.search(r"max_train_steps 4 \(now 3\), .*backend 'torch' \(now 'torch-ffn'\)", differently(report, other))
    with pytest.raises(ConfigError, match=r"finished run of 4 steps with learning_rate .* a larger max_train_steps$"):
        finished(TrainConfig.from_flat({**flat, "learning_rate": 1.0}))


def test_where_the_learning_rate_ends_at_0_other_steps_are_other_numbers(train: Train, flat: dict[str, Any]) -> None:
    cosine = {**flat, "lr_scheduler": "cosine"}
    train(lr_scheduler="cosine")
    with pytest.raises(ConfigError, match=r"finished run of 4 steps with max_train_steps 4 \(now 3\)"):
        finished(TrainConfig.from_flat({**cosine, "max_train_steps": 3}))
    with pytest.warns(UserWarning, match=r"max_train_steps 4 \(now 6\): the run goes on, but its numbers"):
        train(lr_scheduler="cosine", max_train_steps=6)


def test_a_report_that_is_none(flat: dict[str, Any], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no report"):
        finished(TrainConfig.from_flat(flat))


def test_starting_afresh_loses_nothing(train: Train, output: Path, losses: Losses) -> None:
    assert train() is not None
    first = losses(output)
    there = {path.name for path in output.iterdir()}
    assert train(resume_from_checkpoint="false", seed=1) is not None
    assert {path.name for path in (output / "earlier-1").iterdir()} == there
    assert losses(output / "earlier-1") == first
    assert losses(output) != first


def test_leftovers_of_a_killed_process_are_removed(train: Train, output: Path) -> None:
    (output / ".checkpoint-2.partial-123").mkdir(parents=True)
    (output / ".checkpoint-2.partial-123" / "training_state.pt").write_bytes(b"half")
    assert train(max_train_steps=1) is not None
    assert not list(output.glob(".*"))


def test_the_report_of_a_run_whose_last_step_was_already_saved(train: Train, output: Path) -> None:
    report = train()
    assert report is not None
    (output / "report.json").unlink()
    again = train()
    assert again is not None
    assert again["receipt"] == report["receipt"] and again["fixed_batch_loss"] == report["fixed_batch_loss"]
    state = json.loads((output / "checkpoint-4" / "state.json").read_text())["run"]
    assert state["receipt"] == report["receipt"]
