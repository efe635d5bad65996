"""Where a command's words go: the result to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape


def show(*results: RenderableType) -> None:
    """Print a result for people. Text is printed as it is: paths and messages may hold brackets."""
    console = Console(highlight=False, markup=False)
    for result in results:
        console.print(result)


def show_json(result: dict[str, Any]) -> None:
    """Print a result for programs: exactly one JSON object."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def say(text: str, style: str | None = None) -> None:
    """Tell people something that is no result."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def working() -> Iterator[None]:
    """While a command works, what libraries print goes to stderr: stdout is for the result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """While a command works, a line on stderr that says at what: yields what sets it. Only on a terminal."""
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(f"[dim]{escape(text)} …")


def count_in_words(count: int) -> str:
    """A number of parameters for people: ``11.90 B``, ``4.53 M``."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
