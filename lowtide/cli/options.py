"""Arguments and options that several commands share. Help texts of controls come from ``CheckpointConfig``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.option_docs import help_of
from lowtide.controls import BACKENDS, CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.keys import AUTO, Choice, is_unset

if TYPE_CHECKING:
    from lowtide.plan.schedule import Schedule

# Values are text here: CheckpointConfig checks them, so that a mistake reads the same everywhere.
Target = Annotated[
    str,
    typer.Argument(
        metavar="FAMILY|MODEL_DIR",
        help="A family (`lowtide families` lists them), or the folder of a diffusers pipeline or model.",
    ),
]
Backend = Annotated[
    str, typer.Option(metavar="NAME", help=f"{help_of(CheckpointConfig, 'backend')} none: recompute nothing.")
]
Interval = Annotated[str | None, typer.Option(metavar="N", help=help_of(CheckpointConfig, "interval"))]
SegmentStride = Annotated[str | None, typer.Option(metavar="S", help=help_of(CheckpointConfig, "segment_stride"))]
OffloadAttention = Annotated[
    bool, typer.Option("--offload-attention", help=help_of(CheckpointConfig, "offload_attention"))
]
OffloadMinBytes = Annotated[
    str | None, typer.Option(metavar="SIZE", help=help_of(CheckpointConfig, "offload_min_bytes"))
]
SavedPlan = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="FILE", help="A plan that `lowtide plan --save` wrote, instead of the settings above."
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=N", help="Another size of the inputs (B, H, W, FR, T …). Several times."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def controls_from(
    backend: str,
    interval: str | None,
    segment_stride: str | None,
    offload_attention: bool,
    offload_min_bytes: str | None,
) -> CheckpointConfig:
    """The controls that these options give. Raises ConfigError for what is wrong.

    ``auto`` is let through, and refused where a schedule is asked for, which says why; but it is not among the backends
    that the message about a misspelt one names.
    """
    if not is_unset(backend) and backend.strip().lower() != AUTO:
        try:
            Choice(BACKENDS, hint="To recompute nothing: none.")(backend)
        except ConfigError as error:
            raise ConfigError(f"backend: {error}") from None
    return CheckpointConfig.for_attach(
        backend, interval, segment_stride, offload_attention, offload_min_bytes=offload_min_bytes
    )


def schedule_from(path: str | None, config: CheckpointConfig) -> "Schedule | None":
    """The schedule of a saved plan, beside which nothing but the smallest size that moves may be set.

    Raises ConfigError for a file that is no plan, and for other settings.
    """
    if path is None:
        return None
    usual = CheckpointConfig().attach_arguments()
    given = [name for name, value in config.attach_arguments().items() if value != usual[name]]
    if wrong := [name for name in given if name != "offload_min_bytes"]:
        raise ConfigError(f"a plan says by itself what is done with every block: leave {', '.join(wrong)} out.")
    from lowtide.plan.saved_plan import load_plan

    return load_plan(path).schedule


def sizes_of(pairs: Iterable[str]) -> dict[str, int]:
    """Of ``--set NAME=N``, given several times. Raises ConfigError for anything else."""
    sizes = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not value.strip().isdigit() or int(value) < 1:
            raise ConfigError(f"--set {pair!r} is not allowed; expected NAME=N with a whole number from 1, as in B=2")
        sizes[name.strip()] = int(value)
    return sizes
