"""What the commands of ``lowtide bench`` that measure share: options, their checks, and the device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.errors import ConfigError, MachineError
from lowtide.keys import AUTO, Budget

if TYPE_CHECKING:
    from lowtide.bench.record import Condition

INSTALL = "pip install 'lowtide[bench]'"

Rank = Annotated[int, typer.Option(metavar="N", min=1, help="Rank of the LoRA.")]
Precision = Annotated[str, typer.Option(metavar="NAME", help="Of the base's weights. docs/bench.md.")]
Compile = Annotated[str, typer.Option("--compile", metavar="off|regional", help="Compile each block by itself.")]
Attention = Annotated[str, typer.Option(metavar="NAME", help="default, no-cudnn, flash, cudnn, efficient, math.")]
Largest = Annotated[
    str,
    typer.Option(metavar="N", help="Models of more parameters are cut to fewer blocks (10e9). 'none': never."),
]
Size = Annotated[str, typer.Option(metavar="real|tiny", help="tiny: to try a benchmark out, on a CPU too.")]
WarmUp = Annotated[int, typer.Option(metavar="N", min=1, help="First steps, that are not counted.")]
VramBudget = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Of mode auto: 16GiB, or auto (what is free, the default). A cell each."),
]
Steps = Annotated[int, typer.Option(metavar="N", min=2, help="Counted steps.")]


@contextmanager
def libraries() -> Iterator[None]:
    """Around the imports of a benchmark. Raises ConfigError where one of its libraries is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"benchmarks need {error.name}, which is not installed. Install: {INSTALL}") from error


def checked(condition: "Condition") -> "Condition":
    """Raises ConfigError for what no cell could run: better before the first than after the last."""
    from lowtide.bench.check import check

    check(condition)
    return condition


def device_for(conditions: "Iterable[Condition]") -> str:
    """The CPU where all of them are tiny, else the accelerator. Raises MachineError where there is none."""
    return "cpu" if all(condition.size == "tiny" for condition in conditions) else accelerator()


def accelerator() -> str:
    """Its type, as in ``"cuda"``. Raises MachineError where there is none."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise MachineError("there is no accelerator; real sizes are measured on one. --size tiny runs on the CPU")
    return device.type


def budgets_of(text: str | None) -> list[int | str]:
    """Of ``--vram-budget``: bytes or ``auto``. Raises ConfigError for what is no budget."""
    try:
        return [AUTO] if text is None else [Budget()(part.strip()) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(f"--vram-budget {error}") from None


def most_parameters(text: str) -> int:
    """Of ``--largest``. Raises ConfigError for what is no number from 1."""
    if text.strip().lower() == "none":
        return 10**15
    try:
        count = float(text)
    except ValueError:
        count = -1.0
    if not 1 <= count < float("inf"):
        raise ConfigError(f"--largest {text!r} is not allowed; expected a number of parameters, as in 10e9, or 'none'")
    return int(count)
