"""Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lowtide.train.loop import StepDone

_T = TypeVar("_T")
_LINES, _MOST_QUIET_S = 6, 60.0
"""Where there is no terminal: a line so often, and one at least after so many seconds."""


class Reporter:
    """Everything that a run tells while it works."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def track(self, title: str, items: Sequence[_T]) -> Iterable[_T]:
        """Yields ``items``, and says how many there were and how long they took."""
        start = time.perf_counter()
        with self._bar(title, len(items), TimeRemainingColumn(), transient=True) as bar:
            for item in items:
                yield item
                bar.advance(bar.task_ids[0])
        self.say(f"{len(items)} {title}, {time.perf_counter() - start:.1f} s")

    @contextmanager
    def steps(self, done: int, total: int) -> Iterator["StepBar"]:
        columns = TextColumn("loss {task.fields[loss]}  {task.fields[pace]} s/step  {task.fields[memory]}")
        with self._bar("training", total, columns, TimeRemainingColumn()) as bar:
            bar.update(bar.task_ids[0], completed=done)
            yield StepBar(self, bar, total)

    def _bar(
        self, title: str, total: int, *columns: TextColumn | TimeRemainingColumn, transient: bool = False
    ) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns,
            console=self.console, disable=not self.console.is_terminal, transient=transient,
        )  # fmt: skip
        bar.add_task(title, total=total, loss="–", pace="–", memory="–")
        return bar


@contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """While a ``with`` lasts, what lowtide logs is told to people, too."""
    logger, handler = logging.getLogger("lowtide"), logging.Handler(logging.INFO)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class StepBar:
    """Progress of the training steps."""

    def __init__(self, reporter: Reporter, bar: Progress, total: int) -> None:
        self._reporter = reporter
        self._bar = bar
        self._total = total
        self._seconds: list[float] = []  # of the steps since the last line
        self._last_line = time.monotonic()

    def show(self, done: StepDone, memory: str) -> None:
        self._seconds.append(done.seconds)
        loss, pace = f"{done.loss:.4f}", f"{sum(self._seconds) / len(self._seconds):.2f}"
        self._bar.update(self._bar.task_ids[0], completed=done.step, loss=loss, pace=pace, memory=memory)
        every = max(1, self._total // _LINES)
        quiet = time.monotonic() - self._last_line > _MOST_QUIET_S
        if quiet or done.step % every == 0 or done.step == self._total:
            self._seconds, self._last_line = [], time.monotonic()
            if not self._reporter.console.is_terminal:
                self._reporter.say(f"step {done.step} of {self._total}: loss {loss}, {pace} s/step, {memory}")
