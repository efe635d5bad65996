"""Arguments and options that several commands share. Help texts of controls come from ``CheckpointConfig``."""

from typing import Annotated

import typer

from lowtide.cli.option_docs import help_of
from lowtide.controls import CheckpointConfig

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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
