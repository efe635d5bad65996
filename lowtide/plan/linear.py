"""Linear programs by the simplex method on a tableau: the least sum, and how it changes as limits are added.

Made for some ten to a hundred rows. The primal method (Dantzig 1951) finds the first answer, the dual method (Lemke
1954) mends it after each added limit, which takes a few exchanges where a fresh start takes dozens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CLOSE = 1e-9
_MISSING = 1e-7  # that much short of a limit is rounding
_MOST_EXCHANGES = 2000
_STEEPEST = 500  # exchanges by the steepest slope, before Bland's rule, which cannot go in circles
_NONE = -1  # in place of a column

_Floats = NDArray[np.float64]


class Program(NamedTuple):
    """The least ``costs · x`` with x >= 0, where row i of ``columns · x`` equals ``limits[i]``, or is at most that.

    columns: of each x, what it takes of each row. exact: the rows that must be equal to their limits. Figures should be
    scaled to about one.
    """

    costs: Sequence[float]
    columns: Sequence[Mapping[int, float]]
    limits: Sequence[float]
    exact: frozenset[int]


class Tableau:
    """A program and its answer.

    work: figures computed for it, by the thousand, some more for each exchange.
    """

    # _figures: one row for each limit, which is at its end, and one for the sum, which is negated there. _basis: the
    # column that each row stands for; _NONE: what it misses of its limit.

    def __init__(self, program: Program) -> None:
        self.work = 0.0
        self._figures, self._basis = _start(program)
        missing = -self._figures[:-1][self._basis == _NONE].sum(axis=0)
        self._figures = np.vstack((self._figures, missing))
        self._lower(-1)
        self._feasible = bool(-self._figures[-1, -1] < _MISSING)
        self._figures = self._figures[:-1].copy()
        if self._feasible:
            self._drop_the_rest()
            self._lower(-1)

    @property
    def least(self) -> float:
        """Infinite where the limits cannot be kept."""
        return float(-self._figures[-1, -1]) if self._feasible else math.inf

    @property
    def slopes(self) -> Sequence[float]:
        """By column, how much the least rises for each x that is taken though it is not wanted."""
        return self._figures[-1, :-1].tolist()

    def values(self) -> dict[int, float]:
        """The x above 0, by their columns; columns beyond the program's are what is left of limits."""
        found = zip(self._basis.tolist(), self._figures[:-1, -1].tolist(), strict=True)
        return {column: value for column, value in found if value > CLOSE}

    def limited(self, taken: Mapping[int, float], limit: float) -> "Tableau":
        """The answer with one more row: what these columns take is at most ``limit``."""
        rows, width = self._figures.shape
        row = np.zeros(width)
        row[list(taken)] = list(taken.values())
        row[-1] = limit
        row -= row[self._basis] @ self._figures[:-1]
        new = object.__new__(Tableau)
        new.work, new._feasible = 0.0, self._feasible
        new._figures = np.zeros((rows + 1, width + 1))
        kept = [*range(rows - 1), rows]  # the sum stays last
        new._figures[kept, : width - 1] = self._figures[:, :-1]
        new._figures[kept, -1] = self._figures[:, -1]
        new._figures[rows - 1, : width - 1] = row[:-1]
        new._figures[rows - 1, -2:] = 1.0, row[-1]
        new._basis = np.append(self._basis, width - 1)
        new._mend()
        return new

    def _drop_the_rest(self) -> None:
        """Give rows that miss nothing a column, and drop those that follow from others."""
        for place in np.flatnonzero(self._basis == _NONE)[::-1]:
            column = int(np.abs(self._figures[place, :-1]).argmax())
            if abs(self._figures[place, column]) > CLOSE:
                self._exchange(place, column)
            else:
                self._figures = np.delete(self._figures, place, axis=0)
                self._basis = np.delete(self._basis, place)

    def _lower(self, sums: int) -> None:
        """Lower a sum, given by its row, as far as it goes."""
        for number in range(_MOST_EXCHANGES):
            slopes = self._figures[sums, :-1]
            column = int(slopes.argmin() if number < _STEEPEST else (slopes < -CLOSE).argmax())
            if slopes[column] > -CLOSE:
                return
            place = self._first_at_its_limit(column)
            if place is None:
                return
            self._exchange(place, column)

    def _first_at_its_limit(self, column: int) -> int | None:
        """The row that reaches its limit first as a column grows."""
        rows = len(self._basis)
        amounts, left = self._figures[:rows, column], self._figures[:rows, -1]
        empty = np.flatnonzero((self._basis == _NONE) & (amounts < -CLOSE) & (left < CLOSE))
        if len(empty):
            return int(empty[0])  # what misses nothing must not come to miss something
        growing = np.flatnonzero(amounts > CLOSE)
        if not len(growing):
            return None
        return int(growing[(left[growing] / amounts[growing]).argmin()])

    def _mend(self) -> None:
        """Come back within the limits, at the least rise of the sum."""
        for _ in range(_MOST_EXCHANGES):
            place = int(self._figures[:-1, -1].argmin())
            row = self._figures[place]
            if row[-1] > -CLOSE:
                return
            able = np.flatnonzero(row[:-1] < -CLOSE)
            if not len(able):
                self._feasible = bool(row[-1] > -_MISSING)
                return
            rises = np.maximum(self._figures[-1, able], 0.0) / row[able]
            self._exchange(place, int(able[rises.argmax()]))

    def _exchange(self, place: int, column: int) -> None:
        figures = self._figures
        figures[place] /= figures[place, column]
        times = figures[:, column].copy()
        times[place] = 0.0
        figures -= np.outer(times, figures[place])
        figures[:, column] = 0.0
        figures[place, column] = 1.0
        self._basis[place] = column
        self.work += _OF_AN_EXCHANGE + figures.size / 1000


_OF_AN_EXCHANGE = 10.0


def _start(program: Program) -> tuple[_Floats, NDArray[np.int64]]:
    """Rows with limits of at least 0 at their ends, and that of the sum; and the column that each limit's row stands
    for: what is left of it, if all x are 0; _NONE where that is not allowed."""
    rows, count = len(program.limits), len(program.columns)
    loose = [row for row in range(rows) if row not in program.exact]
    figures = np.zeros((rows + 1, count + len(loose) + 1))
    for column, taken in enumerate(program.columns):
        figures[list(taken), column] = list(taken.values())
    figures[loose, range(count, count + len(loose))] = 1.0
    figures[:rows, -1] = program.limits
    figures[-1, :count] = program.costs
    basis = np.full(rows, _NONE)
    basis[loose] = range(count, count + len(loose))
    below = figures[:rows, -1] < 0
    figures[:rows][below] *= -1
    basis[below] = _NONE
    return figures, basis
