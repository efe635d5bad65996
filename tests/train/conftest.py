"""A small run of the trainer: real classes, 96 pixels, one cache for the whole session."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from lowtide.train.config import TrainConfig
from lowtide.train.loop import StepDone
from lowtide.train.prepare import Prepared, prepare
from lowtide.train.progress import Reporter, StepBar
from lowtide.train.run import run

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
PHOTOS = QUICKSTART / "photos"
SMALL: dict[str, Any] = {
    "model_family": "flux1",
    "pretrained_model_name_or_path": "quickstart",
    "data_dir": str(PHOTOS),
    "resolution": 96,
    "tokenizer_max_length": 64,
    "lora_rank": 4,
    "train_batch_size": 2,
    "max_train_steps": 4,
    "learning_rate": 3e-3,
    "mixed_precision": "no",
    "gradient_checkpointing_interval": 2,
    "gradient_checkpointing_segment_stride": 4,
    "checkpoint_step_interval": 2,
    "validation_disable": True,
}


class Tapped:
    """A progress bar that does something after a step's line is written, before its checkpoint is."""

    def __init__(self, bar: StepBar, after: Callable[[StepDone], None]) -> None:
        self.bar, self.after = bar, after

    def show(self, done: StepDone, memory_bytes: int) -> None:
        self.bar.show(done, memory_bytes)
        self.after(done)


class Telling(Reporter):
    """A reporter that keeps what it is told."""

    def __init__(self, after: Callable[[StepDone], None] = lambda done: None) -> None:
        super().__init__(Console(file=io.StringIO(), width=200))
        self.after = after

    @contextmanager
    def steps(self, done: int, total: int) -> Iterator[Any]:
        with super().steps(done, total) as bar:
            yield Tapped(bar, self.after)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the small pipeline and the photographs, made once."""
    folder = tmp_path_factory.mktemp("cache")
    prepare(TrainConfig.from_flat({**SMALL, "cache_dir": str(folder)}), Telling())
    return folder


@pytest.fixture
def flat(tmp_path: Path, cache_dir: Path) -> dict[str, Any]:
    """Flat keys of a small run into a folder of its own."""
    return {**SMALL, "cache_dir": str(cache_dir), "output_dir": str(tmp_path / "out")}


@pytest.fixture(scope="session")
def small(cache_dir: Path) -> dict[str, Any]:
    """Flat keys of a small run, without a folder to write to."""
    return {**SMALL, "cache_dir": str(cache_dir)}


@pytest.fixture
def output(flat: dict[str, Any]) -> Path:
    return Path(flat["output_dir"])


@pytest.fixture
def prepared(flat: dict[str, Any]) -> Prepared:
    return prepare(TrainConfig.from_flat(flat), Telling())


@pytest.fixture
def pipeline_dir(cache_dir: Path) -> Path:
    return cache_dir / "quickstart-pipeline"


@pytest.fixture
def train(flat: dict[str, Any]) -> Callable[..., dict[str, Any] | None]:
    """Runs the trainer with other values for some keys: its report, or None where it was interrupted."""

    def start(after: Callable[[StepDone], None] = lambda done: None, **over: Any) -> dict[str, Any] | None:
        return run(TrainConfig.from_flat({**flat, **over}), Telling(after))

    return start


@pytest.fixture
def train_and_tell(flat: dict[str, Any]) -> Callable[..., tuple[dict[str, Any] | None, str]]:
    """Like ``train``; gives what the run told people, too."""

    def start(after: Callable[[StepDone], None] = lambda done: None, **over: Any) -> tuple[dict[str, Any] | None, str]:
        reporter = Telling(after)
        report = run(TrainConfig.from_flat({**flat, **over}), reporter)
        assert isinstance(reporter.console.file, io.StringIO)
        return report, reporter.console.file.getvalue()

    return start


@pytest.fixture
def config_file(tmp_path: Path, flat: dict[str, Any]) -> Callable[..., Path]:
    """Writes a configuration file with other values for some keys."""

    def write(**over: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**flat, **over}))
        return path

    return write


@dataclass(frozen=True)
class Numbers:
    """What a run computed: the loss of every step, and the LoRA that came out, bit by bit."""

    losses: list[float]
    lora: dict[str, list[float]]


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], list[float]]:
    """The loss of every step that a run's metrics hold; the steps must be 1, 2, 3 …"""

    def read(output: Path) -> list[float]:
        entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
        return [entry["loss"] for entry in entries]

    return read


@pytest.fixture(scope="session")
def numbers(losses: Callable[[Path], list[float]]) -> Callable[[Path], Numbers]:
    """What the finished run in a folder computed; two runs can be compared with ==."""

    def read(output: Path) -> Numbers:
        weights = load_file(output / "lora" / "pytorch_lora_weights.safetensors")
        return Numbers(losses(output), {name: tensor.flatten().tolist() for name, tensor in weights.items()})

    return read


@pytest.fixture(scope="session")
def whole(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory, numbers: Callable[[Path], Numbers]) -> Numbers:
    """What five steps compute that nothing stops."""
    output = tmp_path_factory.mktemp("whole")
    flat = {**SMALL, "cache_dir": str(cache_dir), "output_dir": str(output), "max_train_steps": 5}
    assert run(TrainConfig.from_flat(flat), Telling()) is not None
    return numbers(output)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A copy of the photographs, to be changed."""
    return Path(shutil.copytree(PHOTOS, tmp_path / "photos"))


@pytest.fixture
def quickstart() -> Path:
    """The folder of the quickstart example."""
    return QUICKSTART
