"""Runs each cell in a process of its own, so that a crash or memory left behind costs one cell.

Processes are forked from a server that has imported the libraries and never used an accelerator: a cell begins in a
moment, and begins clean. Where a library asks for the accelerator as soon as it is imported, what is forked cannot use
it any more; there, processes are started anew.
"""

import functools
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch

from lowtide.errors import MachineError

_T = TypeVar("_T")
_PRELOAD = ["lowtide.bench.cell", "diffusers.models.attention_dispatch", "torch._inductor.compile_fx"]
_ASK_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"  # so that `torch.cuda.is_available()` leaves a process fit to fork
_OUT_OF_HOST_MEMORY = -9


class Died(MachineError):
    """The process gave no result; says how it ended."""


def isolated(function: Callable[..., _T], *arguments: Any, device: str, timeout_s: float = 1800.0) -> _T:
    """What ``function`` returns, called in a new process that can use ``device``; both must be picklable.

    timeout_s: a process that takes longer is ended. Raises Died where it gave no result.
    """
    return _called(_context(device), function, arguments, timeout_s)


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
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, arguments), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    with ours:
        try:
            if not ours.poll(timeout_s):
                raise Died(f"took longer than {timeout_s:.0f} s")
            return ours.recv()
        except EOFError:
            process.join()
            raise Died(_ending(process.exitcode)) from None
        finally:
            _end(process)


def _end(process: Any) -> None:
    """The process and all that it started: it leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _send(theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    end = os.dup(theirs.fileno())  # it stays open until the process ends
    threading.Thread(target=_end_unread, args=(end,), daemon=True).start()
    with theirs:
        theirs.send(function(*arguments))


def _end_unread(pipe: int) -> None:
    """Ends this process when whoever waits for the result is gone, however that ended: nobody else would."""
    reader = select.poll()
    reader.register(pipe, 0)  # that it is closed at the other end is told in any case
    reader.poll()
    os.killpg(0, signal.SIGKILL)


def _ending(code: int | None) -> str:
    if code == _OUT_OF_HOST_MEMORY:
        return "its process was killed: CPU memory ran out, probably"
    return f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with code {code}"
