"""Other handlers of signals, for a while."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    """These signals go to ``handler``. Outside of the main thread, where Python allows no handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, other in before.items():
            if other is not None:  # None: of something that is not Python's, which cannot be put back
                signal.signal(number, other)
