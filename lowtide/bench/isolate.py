"""Runs each cell in a process of its own, so that a crash or memory left behind costs one cell.

Processes are forked from a server that has imported the libraries and never used an accelerator: a cell begins in a
moment, and begins clean. Where a library asks for the accelerator as soon as it is imported, what is forked cannot use
it any more; there, processes are started anew.
"""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Self, TypeVar

import torch

from lowtide.errors import MachineError

_T = TypeVar("_T")
_PRELOAD = ["lowtide.bench.cell", "diffusers.models.attention_dispatch", "torch._dynamo"]
_ASK_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"  # so that `torch.cuda.is_available()` leaves a process fit to fork
_OUT_OF_HOST_MEMORY = -9
_READY = "ready for its turn"


class Died(MachineError):
    """The process gave no result; says how it ended."""


def isolated(function: Callable[..., _T], *arguments: Any, device: str, timeout_s: float = 1800.0) -> _T:
    """What ``function`` returns, called in a new process that can use ``device``; both must be picklable.

    timeout_s: a process that takes longer is ended. Raises Died where it gave no result.
    """
    return _called(_context(device), function, arguments, timeout_s)


def in_turn(
    function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], *, device: str, timeout_s: float = 1800.0
) -> Iterator[_T | Died]:
    """What ``function`` returns for each of the calls' arguments, each in a new process; all are begun together.

    function: is given one argument more, to call once: it returns when all others have called theirs or ended, and the
    turn has come. Where it never does, it has no turn. timeout_s: until then, and from then on. Yields Died, in its
    place, where a process gave no result.
    """
    context = _context(device)
    with ExitStack() as processes:
        running = [processes.enter_context(_Process(context, _waiting, (function, call))) for call in calls]
        heard = [process.hear(timeout_s) for process in running]
        for process, word in zip(running, heard, strict=True):
            with process:
                if word == _READY:
                    process.answer()
                    word = process.hear(timeout_s)
                yield word


@functools.cache
def _context(device: str) -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault(_ASK_THE_DRIVER, "1")
    fit = device == "cpu" or _called(context, _can_use, (device,), timeout_s=600.0)
    return context if fit else multiprocessing.get_context("spawn")


def _can_use(device: str) -> bool:
    try:
        torch.empty(1, device=device)
    except RuntimeError:
        return False
    return True


def _called(context: BaseContext, function: Callable[..., _T], arguments: tuple[Any, ...], timeout_s: float) -> _T:
    with _Process(context, _without_turn, (function, arguments)) as process:
        result = process.hear(timeout_s)
    if isinstance(result, Died):
        raise result
    return result


class _Process:
    """Leads a session of its own, and is ended with the ``with``, and all that it started."""

    def __init__(self, context: BaseContext, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, target, arguments), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        self._ended = False
        theirs.close()

    def hear(self, timeout_s: float) -> Any:
        """What it sends next; Died where nothing comes."""
        try:
            if not self._ours.poll(timeout_s):
                return Died(f"took longer than {timeout_s:.0f} s")
            return self._ours.recv()
        except EOFError:
            self._process.join()
            return Died(_ending(self._process.exitcode))

    def answer(self) -> None:
        with suppress(BrokenPipeError):  # it has died, which the next word tells
            self._ours.send(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended:  # by now its number may be another process's
            return
        self._ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._ours.close()


def _run(theirs: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    with theirs:
        theirs.send(target(theirs, *arguments))


def _without_turn(theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def _waiting(theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    def turn() -> None:
        theirs.send(_READY)
        theirs.recv()

    return function(*arguments, turn)


def _ending(code: int | None) -> str:
    if code == _OUT_OF_HOST_MEMORY:
        return "its process was killed: CPU memory ran out, probably"
    return f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with code {code}"
