"""Fixtures of the contract suite; see cases.py, modes.py and observed.py."""

import os
from collections.abc import Iterator

import pytest
import torch

from lowtide import families
from lowtide.families import Family
from tests.contract.modes import ALL, FEW, Mode, Observation, observe

EVERY_MODE = os.environ.get("LOWTIDE_EVERY_MODE", "0") not in ("", "0")
"""Every row in every mode, and every other test with every row: an hour."""

THOROUGH = ("flux1", "sd15", "sana", "wan21_1_3b")
"""Rows whose blocks differ most from each other, of like ones the smallest: they run every mode. Any other row runs
two or three, neighbours others."""
_APART = 20

ROWS = [row for row in families.all_families() if EVERY_MODE or row.key in THOROUGH]


def _steps() -> Iterator[tuple[str, Mode, str]]:
    for number, row in enumerate(families.all_families()):
        modes = [(mode, "full") for mode in ALL] + [(mode, "lora") for mode in FEW]
        chosen = modes if EVERY_MODE or row.key in THOROUGH else modes[number % _APART :: _APART]
        yield from ((row.key, mode, training) for mode, training in chosen)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ROWS, ids=lambda row: row.key)
def row(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def rotating(row: Family) -> int:
    """The row's number: where one mode a row is enough, neighbours take different ones."""
    return [other.key for other in families.all_families()].index(row.key)


@pytest.fixture(scope="session", params=_steps(), ids=lambda step: "-".join(map(str, step)))
def seen(request: pytest.FixtureRequest) -> Observation:
    """A step of every row in every mode. For the session, so that the tests of one step run one after another."""
    return observe(*request.param)
