"""Where a run begins: at nothing, at a checkpoint, or not at all because it is done."""

from pathlib import Path

from lowtide.train.config import AFRESH, CONTROLS, TrainConfig, changes
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
        plan = config.checkpointing.schedule
        used = None if plan is None else Path(plan).expanduser().resolve()
        _move_aside(output, [path for path in _results(output) if path.resolve() != used], reporter)
        return RunState(config.record(), data), None
    state = read_state(path)
    check_continues(path, state, config, data)
    _move_aside(output, [later for later in checkpoints(output) if step_of(later) > state.step], reporter)
    cut_metrics(output, state.step)
    if changes(state.config, config, only=CONTROLS):
        state.setting = {}  # somebody has chosen anew
    state.config, state.data = config.record(), data
    reporter.say(f"going on from {path}: {state.step} of {config.keys.max_train_steps} steps are done")
    return state, path


def _results(output: Path) -> list[Path]:
    """Everything of a run that is there, if any of it is worth keeping: steps that no checkpoint holds are not."""
    kept = [path for path in (*checkpoints(output), output / REPORT, *_weights(output)) if path.exists()]
    rest = [output / name for name in (METRICS, BEFORE, AFTER, BOTH, PLAN)]
    if not kept:
        (output / METRICS).unlink(missing_ok=True)
        return []
    return [*kept, *(path for path in rest if path.exists())]


def _weights(output: Path) -> list[Path]:
    return [output / name for name in WEIGHTS.values()]


def _move_aside(output: Path, entries: list[Path], reporter: Reporter) -> None:
    if not entries:
        return
    number = 1
    while (output / f"earlier-{number}").exists():
        number += 1
    target = output / f"earlier-{number}"
    target.mkdir()
    for entry in entries:
        entry.rename(target / entry.name)
    reporter.say(f"moved what an earlier run left ({len(entries)} files and folders) to {target}")
