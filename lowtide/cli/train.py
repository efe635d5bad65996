"""``lowtide train``: from a configuration to trained weights and a report."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from lowtide.allocator import SETTINGS
from lowtide.cli.output import show, working
from lowtide.cli.receipt_table import receipt_table
from lowtide.train.config import LATEST, START_AFRESH, TrainConfig, load_config
from lowtide.train.report import differently, finished, result_lines, settings_table

if TYPE_CHECKING:
    from lowtide.train.progress import Reporter

_INTERRUPTED = 130
_YOUR_OWN = """
The small model has random weights, so its samples are coloured noise.
With a real one, and pictures of yours:

  lowtide train examples/quickstart/your_model.json \\
    --set pretrained_model_name_or_path=FOLDER_OF_FLUX_1 \\
    --set data_dir=FOLDER_OF_PICTURES"""

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A flat JSON file; docs/train.md lists its keys.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file. May be given several times."),
]


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a LoRA (or every weight) on a folder of captioned pictures. Run it again and it goes on where it was."""
    settings = load_config(config, overrides or ())
    report = finished(settings)
    if report is not None:
        otherwise = differently(report, settings)
        show(
            as_it_is(
                f"This run is done already: {report['steps']} steps. With a larger max_train_steps it goes on. To run "
                f"it once more, {START_AFRESH}." + (f"\nIt ran with {otherwise}." if otherwise else "")
            )
        )
    else:
        with working():
            report = _trained(settings)
    if report is None:
        again = "Run the same command again"
        if settings.keys.resume_from_checkpoint != LATEST:
            again += f" without resume_from_checkpoint={settings.keys.resume_from_checkpoint}"
        show(f"Stopped; a checkpoint is in {settings.keys.output}. {again}: it goes on from there.")
        raise typer.Exit(_INTERRUPTED)
    show(*_ending(report, settings))


def _trained(settings: TrainConfig) -> dict[str, Any] | None:
    reporter = quiet_reporter()
    from lowtide.train.run import run

    return run(settings, reporter)


def quiet_reporter() -> "Reporter":
    """Where a run tells how far it is; loads the libraries, and keeps them off the network and quiet."""
    console = Console(stderr=True)
    console.print("loading torch, diffusers and transformers", style="dim")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported, next
    if sys.platform == "linux" and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", SETTINGS)
    from lowtide.train.loading import quiet_libraries
    from lowtide.train.progress import Reporter

    quiet_libraries()
    return Reporter(console)


def _ending(report: Mapping[str, Any], settings: TrainConfig) -> Iterator[RenderableType]:
    yield receipt_table(report["receipt"])
    yield Text()
    yield from map(as_it_is, result_lines(report))
    yield settings_table(report)
    if settings.keys.makes_pipeline:
        yield as_it_is(_YOUR_OWN)


def as_it_is(text: str) -> Text:
    """Lines that a terminal wraps but rich does not, so that commands and paths can be copied."""
    return Text(text, no_wrap=True, overflow="ignore")
