"""Linear programs: by hand, against all corners, and added limits against a fresh start."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.plan.linear import Program, Tableau

_figures = st.integers(-5, 5).map(float)


def _program(costs, rows, limits, exact=()) -> Program:
    columns = [{row: float(amounts[column]) for row, amounts in enumerate(rows)} for column in range(len(costs))]
    return Program([float(cost) for cost in costs], columns, [float(limit) for limit in limits], frozenset(exact))


def test_the_least_and_where_it_is() -> None:
    found = Tableau(_program([-3, -5], [[1, 0], [0, 2], [3, 2]], [4, 12, 18]))
    assert found.least == pytest.approx(-36)
    assert {column: value for column, value in found.values().items() if column < 2} == pytest.approx({0: 2, 1: 6})


def test_rows_that_must_be_equal_and_slopes() -> None:
    found = Tableau(_program([1, 2], [[1, 1]], [3], exact=[0]))
    assert found.least == pytest.approx(3) and found.values() == pytest.approx({0: 3})
    assert found.slopes[1] == pytest.approx(1)  # one of the second instead of one of the first


def test_rows_that_say_the_same_twice() -> None:
    assert Tableau(_program([1, 2], [[1, 1], [2, 2]], [3, 6], exact=[0, 1])).least == pytest.approx(3)
    assert Tableau(_program([1, 2], [[1, 1], [2, 2]], [3, 7], exact=[0, 1])).least == math.inf


def test_an_added_limit_raises_the_least_and_may_leave_nothing() -> None:
    found = Tableau(_program([1, 2], [[1, 1]], [3], exact=[0]))
    at_most = found.limited({0: 1.0}, 2.0)
    assert at_most.least == pytest.approx(4) and found.least == pytest.approx(3)
    assert at_most.limited({1: 1.0}, 0.5).least == math.inf


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Bounded: at most 10 of each of two or three x."""
    count, more = draw(st.integers(2, 3)), draw(st.integers(0, 3))
    rows = [[float(place == column) for column in range(count)] for place in range(count)]
    rows += [[draw(_figures) for _ in range(count)] for _ in range(more)]
    limits = [10.0] * count + [draw(_figures) for _ in range(more)]
    exact = draw(st.sets(st.integers(count, count + more - 1))) if more else set()
    return _program([draw(_figures) for _ in range(count)], rows, limits, exact)


@settings(deadline=None, max_examples=300)
@given(programs())
def test_no_corner_is_lower(program: Program) -> None:
    assert Tableau(program).least == pytest.approx(_least_corner(program), abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(programs(), st.lists(st.tuples(st.lists(_figures, min_size=3, max_size=3), _figures), min_size=1, max_size=3))
def test_added_limits_are_as_if_they_had_been_there(program: Program, added) -> None:
    found, whole = Tableau(program), program
    for amounts, limit in added:
        taken = {column: amounts[column] for column in range(len(program.costs))}
        found = found.limited(taken, limit)
        columns = [{**column, len(whole.limits): taken[number]} for number, column in enumerate(whole.columns)]
        whole = whole._replace(columns=columns, limits=[*whole.limits, limit])
    assert found.least == pytest.approx(_least_corner(whole), abs=1e-6)


def _least_corner(program: Program) -> float:
    """By trying every set of rows and signs that could hold with equality."""
    count = len(program.costs)
    rows = np.array([[column.get(row, 0.0) for column in program.columns] for row in range(len(program.limits))])
    sides, limits = np.vstack((rows, -np.eye(count))), np.array([*program.limits, *[0.0] * count])
    exact = [row in program.exact for row in range(len(limits))]
    least = math.inf
    for chosen in itertools.combinations(range(len(limits)), count):
        if abs(np.linalg.det(sides[list(chosen)])) < 1e-9:
            continue
        point = np.linalg.solve(sides[list(chosen)], limits[list(chosen)])
        left = limits - sides @ point
        if (left >= -1e-7).all() and (abs(left[exact]) < 1e-7).all():
            least = min(least, float(np.dot(program.costs, point)))
    return least
