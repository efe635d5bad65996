"""Handlers of signals, for a while."""

import os
import signal
import threading
import time

import pytest

from lowtide.signals import handled


def test_a_polite_kill_can_be_as_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), handled(signal.default_int_handler, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_is_not_pythons_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda _, handler: put.append(handler))  # None, as of a handler in C
    with handled(signal.default_int_handler, signal.SIGTERM):
        pass
    assert put == [signal.default_int_handler]


def test_outside_of_the_main_thread_what_handles_them_stays() -> None:
    seen = []

    def run() -> None:
        with handled(lambda *_: None, signal.SIGTERM):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
