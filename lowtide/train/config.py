"""The trainer's configuration: a flat JSON file, checked whole before anything is loaded or written."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.keys import (
    Choice,
    Keys,
    Switch,
    Text,
    WholeNumber,
    boolean_of,
    did_you_mean,
    is_unset,
    key_of,
    read_flat_json,
    shown,
)
from lowtide.train.families import TRAINABLE, trainable_key

QUICKSTART = "quickstart"
LATEST, AFRESH = "latest", "false"
RAISE, ESCALATE = "raise", "escalate"
START_AFRESH = "start afresh with `--set resume_from_checkpoint=false` (what is there is moved aside, not lost)"
HARMLESS = (
    "output_dir",
    "cache_dir",
    "checkpoint_step_interval",
    "checkpoints_total_limit",
    "resume_from_checkpoint",
    "on_out_of_memory",
)
"""Keys that change nothing of what a run computes."""
CONTROLS = tuple(key_of(name, field) for name, field in CheckpointConfig.model_fields.items())
"""Keys of checkpointing and offload."""
SAME_NUMBERS = (
    "validation_disable",
    "validation_prompt",
    "validation_num_inference_steps",
    *CONTROLS,
)
"""Keys that do not change the numbers of a step."""
CONSTANT = "constant"
_REQUIRED = ("model_family", "pretrained_model_name_or_path", "data_dir")
_INPUT_PATHS = ("pretrained_model_name_or_path", "data_dir", "gradient_checkpointing_schedule")


@dataclass(frozen=True)
class Number:
    """Validator of a number that is not negative; text such as "1e-4" is taken too."""

    allowed = "a number, 0 or more"

    def __call__(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.")
        return number


@dataclass(frozen=True)
class _Trainable:
    allowed = ", ".join(TRAINABLE)

    def __call__(self, value: Any) -> str:
        return trainable_key(Text("the name of a family")(value))


@dataclass(frozen=True)
class _Resume:
    allowed = "latest, false, or the name of a checkpoint such as checkpoint-40"

    def __call__(self, value: Any) -> str:
        if boolean_of(value) is not None:
            return LATEST if boolean_of(value) else AFRESH
        return Text(self.allowed)(value)


_Count = Annotated[int, BeforeValidator(WholeNumber(1))]
_CountOrZero = Annotated[int, BeforeValidator(WholeNumber(0))]
_Number = Annotated[float, BeforeValidator(Number())]
_FOLDER = "path of a folder"


class TrainKeys(Keys):
    """The keys of the trainer, without those of checkpointing. Names are SimpleTuner's."""

    model_family: Annotated[str | None, BeforeValidator(_Trainable())] = Field(
        default=None, description="What kind of model is trained. Required."
    )
    pretrained_model_name_or_path: Annotated[
        str | None, BeforeValidator(Text(f"{_FOLDER} as diffusers saves a pipeline, or {QUICKSTART}"))
    ] = Field(
        default=None,
        description="The pipeline to train, on this machine; nothing is downloaded. `quickstart`: a small one with "
        "random weights is made in the cache folder. Required.",
    )
    model_type: Annotated[str, BeforeValidator(Choice(("lora", "full")))] = Field(
        default="lora", description="`lora`: train an adapter, the model stays frozen. `full`: train every weight."
    )
    lora_type: Annotated[str, BeforeValidator(Choice(("standard",)))] = Field(
        default="standard", description="`standard`: LoRA as PEFT makes it."
    )
    lora_rank: _Count = Field(default=16, description="Width of the adapter: more learns more and weighs more.")
    lora_alpha: Annotated[float | None, BeforeValidator(Number())] = Field(
        default=None, description="The adapter is scaled by alpha / rank. Unset: alpha is the rank."
    )
    data_dir: Annotated[str | None, BeforeValidator(Text(_FOLDER))] = Field(
        default=None,
        description="Folder of pictures, each with its caption beside it in a .txt file of the same name. Required.",
    )
    cache_dir: Annotated[str | None, BeforeValidator(Text(_FOLDER))] = Field(
        default=None,
        description="Where latents and text embeddings are kept. Unset: `cache` in `output_dir`. "
        "Several runs can share one.",
    )
    resolution: Annotated[int, BeforeValidator(WholeNumber(32))] = Field(
        default=1024,
        description="Side, in pixels, of the square whose area every picture gets; its shape stays about its own.",
    )
    tokenizer_max_length: Annotated[int | None, BeforeValidator(WholeNumber(1))] = Field(
        default=None, description="Longest caption in tokens. Unset: the most that the family takes (512 for flux1)."
    )
    train_batch_size: _Count = Field(default=1, description="Pictures in one forward.")
    gradient_accumulation_steps: _Count = Field(default=1, description="Forwards and backwards in one step.")
    max_train_steps: _Count = Field(default=1000, description="Steps (updates of the weights) in all.")
    learning_rate: _Number = Field(default=1e-4, description="Size of an update.")
    lr_scheduler: Annotated[str, BeforeValidator(Choice((CONSTANT, "linear", "cosine")))] = Field(
        default=CONSTANT, description="How the learning rate goes on after the warm-up; the last two end at 0."
    )
    lr_warmup_steps: _CountOrZero = Field(default=0, description="Steps in which the learning rate rises from 0.")
    optimizer: Annotated[str, BeforeValidator(Choice(("torch-adamw",)))] = Field(
        default="torch-adamw", description="`torch-adamw`: AdamW as torch has it."
    )
    max_grad_norm: _Number = Field(default=1.0, description="Gradients longer than this are shortened to it. 0: never.")
    mixed_precision: Annotated[str, BeforeValidator(Choice(("no", "bf16")))] = Field(
        default="bf16",
        description="`bf16`: the frozen model in bfloat16, what is trained in float32 under autocast. "
        "`no`: all in float32.",
    )
    on_out_of_memory: Annotated[str, BeforeValidator(Choice((RAISE, ESCALATE)))] = Field(
        default=RAISE,
        description="When a forward or backward runs out of memory. `raise`: the run ends with that error. `escalate`: "
        "the batch is repeated with the next setting of checkpointing that needs less by prediction, which then stays.",
    )
    seed: _CountOrZero = Field(default=42, description="Of everything random. The same seed gives the same run.")
    output_dir: Annotated[str, BeforeValidator(Text(_FOLDER))] = Field(
        default="output", description="Where checkpoints, weights, samples and the report go."
    )
    checkpoint_step_interval: _Count = Field(default=500, description="Steps between checkpoints.")
    checkpoints_total_limit: _Count = Field(default=5, description="How many checkpoints stay: the newest ones.")
    resume_from_checkpoint: Annotated[str, BeforeValidator(_Resume())] = Field(
        default=LATEST,
        description="`latest`: go on where `output_dir` stands. `false`: start afresh; what is there is moved into a "
        "folder in it, `earlier-1` and so on. Or the name of a checkpoint.",
    )
    validation_disable: Annotated[bool, BeforeValidator(Switch())] = Field(
        default=False, description="true: no sample before and after."
    )
    validation_prompt: Annotated[str | None, BeforeValidator(Text("a caption"))] = Field(
        default=None, description="Caption of the sample. Unset: the first picture's."
    )
    validation_num_inference_steps: _Count = Field(default=20, description="Denoising steps of the sample.")

    @property
    def family(self) -> str:
        return self.model_family or ""

    @property
    def output(self) -> Path:
        return Path(self.output_dir).expanduser()

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else self.output / "cache"

    @property
    def data(self) -> Path:
        return Path(self.data_dir or "").expanduser()

    @property
    def makes_pipeline(self) -> bool:
        return self.pretrained_model_name_or_path == QUICKSTART

    @property
    def pipeline(self) -> Path:
        """The folder of the pipeline; of the small one, where it is made."""
        if self.makes_pipeline:
            return self.cache / "quickstart-pipeline"
        return Path(self.pretrained_model_name_or_path or "").expanduser()


@dataclass(frozen=True)
class TrainConfig:
    """What a run is made from. keys: the trainer's. checkpointing: the controls of recomputation."""

    keys: TrainKeys
    checkpointing: CheckpointConfig

    @classmethod
    def from_flat(cls, given: Mapping[str, Any]) -> "TrainConfig":
        """From flat keys, as JSON files have them; relative paths stay as they are.

        Raises ConfigError for unknown or missing keys, wrong values, or keys that contradict each other: names all.
        """
        known = {model: _keys_of(model) for model in (TrainKeys, CheckpointConfig)}
        mistakes = list(_misnamed(given, [key for keys in known.values() for key in keys]))
        made: dict[type[Keys], Any] = {}
        for model, keys in known.items():
            try:
                made[model] = model(**{key: value for key, value in given.items() if key in keys})
            except ConfigError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return cls(made[TrainKeys], made[CheckpointConfig])

    def as_flat_dict(self) -> dict[str, Any]:
        """Every key as a JSON file has it."""
        return {**self.keys.as_flat_dict(), **self.checkpointing.as_flat_dict()}

    def record(self) -> dict[str, Any]:
        """The flat keys for files that are read again: input paths do not depend on the current folder."""
        flat = self.as_flat_dict()
        paths = {key: flat[key] for key in _INPUT_PATHS if flat[key] not in (None, QUICKSTART)}
        return {**flat, **{key: str(Path(path).expanduser().resolve()) for key, path in paths.items()}}


def _misnamed(given: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    yield from (f"unknown key {key!r}.{did_you_mean(key, known)} {_SEE}" for key in given if key not in known)
    missing = [key for key in _REQUIRED if is_unset(given.get(key))]
    if missing:
        yield f"missing: {', '.join(missing)}. {_SEE}"


_SEE = "docs/train.md lists the keys."
_DEFAULTS = {
    key_of(name, field): field.default
    for model in (TrainKeys, CheckpointConfig)
    for name, field in model.model_fields.items()
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """From a JSON file and ``key=value`` texts that go over it, and over what cannot stand beside them.

    Relative input paths in the file start at the file's folder; in an override, and ``output_dir`` and ``cache_dir``
    always, at the current folder. Raises ConfigError: names the file where the mistake is in it.
    """
    changed = dict(_override(text) for text in overrides)
    try:
        given = {key: _beside(path, key, value) for key, value in read_flat_json(path).items()}
        for key in CheckpointConfig.displaced_by(changed):
            given.pop(key, None)
        config = TrainConfig.from_flat({**given, **changed})
        for key, folder in (("output_dir", config.keys.output), ("cache_dir", config.keys.cache)):
            _check_folder(key, folder)
        _check_apart(config.keys)
        return config
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if not changed else f"{path} with --set: {error}") from None


def _check_folder(key: str, folder: Path) -> None:
    """ConfigError where a file stands in the way of a folder that the run will make."""
    in_the_way = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if in_the_way.exists() and not in_the_way.is_dir():
        raise ConfigError(f"{key}: {in_the_way} is a file, and a folder is wanted: name another place")


def _check_apart(keys: TrainKeys) -> None:
    """ConfigError where the run's own pictures, its samples, would be among those that it trains on."""
    output = keys.output.resolve()
    if keys.data_dir and output.is_relative_to(keys.data.resolve()):
        raise ConfigError(
            f"output_dir: {keys.output} is in data_dir, {keys.data}, where every picture is trained: samples would be, "
            "too. Name a folder outside of it"
        )


def changes(
    record: Mapping[str, Any], config: TrainConfig, *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> str:
    """In words, where an earlier run's ``TrainConfig.record`` differs from this configuration; empty if nowhere.

    A key that the version of that run did not have counts as its default.
    """
    now, then = config.record(), {**_DEFAULTS, **record}
    keys = [key for key in only or now if key not in without and then.get(key) != now[key]]
    return ", ".join(f"{key} {shown(then.get(key))} (now {shown(now[key])})" for key in keys)


def same_numbers(keys: TrainKeys) -> tuple[str, ...]:
    """Keys that do not change the numbers of a step. The number of steps does, where the learning rate ends at 0."""
    return (*HARMLESS, *SAME_NUMBERS, *(("max_train_steps",) if keys.lr_scheduler == CONSTANT else ()))


def _override(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected key=value, as in --set learning_rate=1e-4")
    return key.strip(), value


def _beside(config: Path, key: str, value: Any) -> Any:
    if key not in _INPUT_PATHS or not isinstance(value, str) or not value or value == QUICKSTART:
        return value
    return str(config.expanduser().parent / Path(value).expanduser())


def _keys_of(model: type[Keys]) -> tuple[str, ...]:
    return tuple(key_of(name, field) for name, field in model.model_fields.items())
