"""Where a run begins: at nothing, at a checkpoint, or not at all because it is done."""

import shutil
from pathlib import Path

from lowtide.train.config import AFRESH, CONTROLS, LATEST, TrainConfig, changes
from lowtide.train.files import clean_up
from lowtide.train.metrics import METRICS, cut_metrics
from lowtide.train.progress import Reporter
from lowtide.train.report import PLAN, REPORT, WEIGHTS
from lowtide.train.resume import RunState, check_continues, checkpoints, choose_checkpoint, read_state, step_of
from lowtide.train.samples import AFTER, BEFORE, BOTH


def begin(config: TrainConfig, data: str, reporter: Reporter) -> tuple[RunState, Path | None]:
    """The state to train from, and its checkpoint if there is one. data: digest of what is trained on.

    What an earlier run left and this one would write over is moved into a folder ``earlier-N`` beside it.
    """
    output = config.keys.output
    clean_up(output)
    wanted = config.keys.resume_from_checkpoint
    path = None if wanted == AFRESH else choose_checkpoint(output, wanted)
    if path is None:
        _move_aside(output, [path for path in _results(output) if path.resolve() != _used(config)], reporter)
        return RunState(config.record(), data), None
    state = read_state(path)
    check_continues(path, state, config, data)
    later = [path for path in checkpoints(output) if step_of(path) > state.step]
    if wanted != LATEST:  # it goes back: what came of the steps after it is another run's
        later += [path for path in (*_ends(output), output / PLAN) if path.exists() and path.resolve() != _used(config)]
    aside = _move_aside(output, later, reporter)
    if aside is not None and (output / METRICS).exists():
        shutil.copy2(output / METRICS, aside)
    cut_metrics(output, state.step)
    if changes(state.config, config, only=CONTROLS):
        state.setting = {}  # somebody has chosen anew
    state.config, state.data = config.record(), data
    most = config.keys.max_train_steps
    if state.step >= most:
        reporter.say(f"{path} has {state.step} steps, and max_train_steps is {most}: no step is left, its weights stay")
    else:
        reporter.say(f"going on from {path}: {state.step} of {most} steps are done")
    return state, path


def _used(config: TrainConfig) -> Path | None:
    """The plan that the run is given, if it is."""
    plan = config.checkpointing.schedule
    return None if plan is None else Path(plan).expanduser().resolve()


def _results(output: Path) -> list[Path]:
    """Everything of a run that is there, if any of it is worth keeping: steps that no checkpoint holds are not."""
    kept = [path for path in (*checkpoints(output), output / REPORT, *_weights(output)) if path.exists()]
    rest = [output / name for name in (METRICS, BEFORE, AFTER, BOTH, PLAN)]
    if not kept:
        (output / METRICS).unlink(missing_ok=True)
        return []
    return [*kept, *(path for path in rest if path.exists())]


def _ends(output: Path) -> list[Path]:
    """What a run writes when it is done."""
    return [output / REPORT, *_weights(output), output / AFTER, output / BOTH]


def _weights(output: Path) -> list[Path]:
    return [output / name for name in WEIGHTS.values()]


def _move_aside(output: Path, entries: list[Path], reporter: Reporter) -> Path | None:
    """The folder where they are now; None where there are none."""
    if not entries:
        return None
    number = 1
    while (output / f"earlier-{number}").exists():
        number += 1
    target = output / f"earlier-{number}"
    target.mkdir()
    for entry in entries:
        entry.rename(target / entry.name)
    reporter.say(f"moved what an earlier run left ({len(entries)} files and folders) to {target}")
    return target
