"""The ``lowtide`` command: its commands, its exit codes, and how errors look.

Exit codes: 0 done, 1 the check failed, 2 wrong usage or configuration, 3 the machine failed (disk, memory, device).
"""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import lowtide
from lowtide.cli import bench, bench_report, bench_tools, cache, families, inspect, plan, train, verify
from lowtide.cli.extras import extra_with
from lowtide.cli.output import say
from lowtide.errors import LowtideError, MachineError

_DEBUG = "LOWTIDE_DEBUG"
_FAILURES = (LowtideError, OSError, MemoryError, RuntimeError, ModuleNotFoundError)


class Commands(TyperGroup):
    """Turns errors that are part of the product into one message and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        with _warnings_in_plain_words():
            try:
                return super().invoke(ctx)
            except BrokenPipeError:
                raise
            except _FAILURES as error:
                known = _as_known(error)
                if known is None:
                    raise
                if os.environ.get(_DEBUG, "0") not in ("", "0"):
                    traceback.print_exception(error)
                say(f"error: {known}", style="red")
                raise typer.Exit(known.exit_code) from error


app = typer.Typer(
    cls=Commands,
    help="Trains diffusion models in the VRAM you have: decides block by block which activations are kept and which "
    "are recomputed in backward, and proves what it did.",
    epilog=f"Exit codes: 0 done, 1 the check failed, 2 wrong usage or configuration, 3 the machine failed. "
    f"{_DEBUG}=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {lowtide.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The ``lowtide`` command."""
    try:
        app(prog_name="lowtide")
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    sys.exit(_flushed(code))


def _flushed(code: Any) -> Any:
    """``code``, or 3 where what was printed cannot be written. Python would print a traceback and return 120 itself."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there at exit
        if code == 0 and not isinstance(error, BrokenPipeError):
            known = MachineError(str(error.strerror or error))
            say(f"error: {known}", style="red")
            return known.exit_code
    return code


benchmarks = typer.Typer(
    cls=Commands,
    help="Measure seconds a step and peak memory, mode by mode; report and compare what was measured; look closer.",
    no_args_is_help=True,
)
benchmarks.command("synthetic")(bench.synthetic)
benchmarks.command("family")(bench.family)
benchmarks.command("report")(bench_report.report)
benchmarks.command("compare")(bench_report.compare)
benchmarks.command("host")(bench_tools.host)
benchmarks.command("attention")(bench_tools.attention)
benchmarks.command("profile")(bench_tools.profile)

app.command("families")(families.families)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("cache")(cache.cache)
app.add_typer(benchmarks, name="bench")
app.command("train")(train.train)


def _as_known(error: Exception) -> LowtideError | None:
    """The error that people see, or None for one that nobody expected: a bug, whose traceback is wanted."""
    if isinstance(error, LowtideError):
        return error
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return MachineError(f"{error.strerror or error}{where}")
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return MachineError("\n".join((f"out of memory. {error}".strip(), *vars(error).get("__notes__", ()))))
    if isinstance(error, ModuleNotFoundError) and (extra := extra_with(error.name or "")):
        return MachineError(
            f"this needs {error.name}, which is not installed. Install it with: pip install 'lowtide[{extra}]'"
        )
    return None


@contextmanager
def _warnings_in_plain_words() -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        say(f"warning: {message}", style="yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
