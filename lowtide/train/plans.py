"""Saved plans in a run: one that it is given, and the one that ``auto`` comes to."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lowtide import families
from lowtide.auto.handle import AutoHandle
from lowtide.errors import ConfigError
from lowtide.handle import check_schedule
from lowtide.plan.saved_plan import load_plan, save_plan
from lowtide.plan.schedule import Schedule
from lowtide.runtime.link import accelerator_or_simulated
from lowtide.runtime.resolve import resolve
from lowtide.train.config import TrainConfig, TrainKeys
from lowtide.train.families.base import Denoiser
from lowtide.train.files import new_file
from lowtide.train.report import PLAN
from lowtide.units import format_bytes

_OF_A_RUN = ("resolution", "train_batch_size", "gradient_accumulation_steps", "mixed_precision")
"""Keys that a plan made in a run says it was made with."""
TRAINED_PARAMETERS, TEXT_TOKENS = "trained_parameters", "T"
"""Names of conditions of plans."""
_PRECISION = {"bf16": "bf16 autocast", "no": "float32"}


def check_that_it_can_run(path: str | None) -> None:
    """Before anything is written. Raises ConfigError where something is to move and there is nowhere to."""
    try:
        accelerator_or_simulated()
    except ConfigError as error:
        raise ConfigError(
            f"gradient_checkpointing_schedule: by the plan in {path} some activations wait in CPU memory, and torch "
            "sees no accelerator on this machine. Leave the key out, or make a plan by which nothing moves: `lowtide "
            "plan --host-memory 0`."
        ) from error


def check_that_it_is_for(denoiser: Denoiser, config: TrainConfig, planned: Schedule) -> None:
    """Raises ConfigError for the plan of a model of other blocks."""
    try:
        check_schedule(planned, resolve(denoiser.model, families.find(config.keys.family).stacks))
    except ConfigError as error:
        raise ConfigError(f"gradient_checkpointing_schedule: {config.checkpointing.schedule}: {error}") from error


def tell_what_differs(config: TrainConfig, of_run: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Where the run is another one than the plan was made for: its peak may be another one, too.

    of_run: what no key says of it, as plans name it.
    """
    path = config.checkpointing.schedule
    differences = [] if path is None else list(_differences(load_plan(path).conditions, config.keys, of_run))
    if differences:
        say(
            f"The plan in {path} was made for {', '.join(differences)}. Steps may need more memory than it says, or "
            "less: make one for this run."
        )


def _differences(conditions: Mapping[str, str], keys: TrainKeys, of_run: Mapping[str, str]) -> Iterator[str]:
    if {"W", "H"} <= conditions.keys():  # of one made by `lowtide plan`, whose names are those of the model's inputs
        width, height = conditions["W"], conditions["H"]
        side = keys.resolution if width.isdigit() and height.isdigit() else 0
        if side and int(width) * int(height) != side**2:
            yield f"{width}x{height} pixels (this run: about {side}x{side})"
    for name, title, now in (
        ("trained", "", trained_text(keys)),
        (TRAINED_PARAMETERS, "trained parameters: ", of_run[TRAINED_PARAMETERS]),
        (TEXT_TOKENS, "text tokens: ", of_run[TEXT_TOKENS]),
        ("B", "batch ", str(keys.train_batch_size)),
        ("accumulation", "accumulation ", str(keys.gradient_accumulation_steps)),
        ("precision", "", _PRECISION[keys.mixed_precision]),
        ("optimizer", "optimizer ", keys.optimizer.removeprefix("torch-")),
        *((key, f"{key} ", str(getattr(keys, key))) for key in _OF_A_RUN),
    ):
        then = conditions.get(name)
        if then is not None and then != now:
            yield f"{title}{then} (this run: {now})"


def save_what_auto_found(keys: TrainKeys, of_run: Mapping[str, str], handle: object) -> dict[str, str]:
    """The file of the plan that auto has come to, for the report: another run can begin with it."""
    if not isinstance(handle, AutoHandle) or handle.plan is None or not handle.settled:
        return {}
    path: Path = keys.output / PLAN
    conditions = {
        "model": families.find(keys.family).title,
        "found by": "auto, in training",
        "budget": format_bytes(handle.budget_bytes or 0),
        "trained": trained_text(keys),
        **of_run,
        **{key: str(getattr(keys, key)) for key in _OF_A_RUN},
    }
    with new_file(path) as partial:
        save_plan(partial, handle.plan, conditions)
    return {"plan": str(path)}


def trained_text(keys: TrainKeys) -> str:
    """What is trained, as plans name it."""
    return f"LoRA {keys.lora_rank}" if keys.model_type == "lora" else "all weights"
