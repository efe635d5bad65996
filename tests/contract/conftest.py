"""Fixtures of the contract suite; see cases.py, modes.py and observed.py."""

from collections.abc import Iterator

import pytest
import torch

from lowtide import families
from lowtide.families import Family
from tests.contract.modes import ALL, FEW, Observation, observe

STEPS = [(row.key, mode, "full") for row in families.all_families() for mode in ALL] + [
    (row.key, mode, "lora") for row in families.all_families() for mode in FEW
]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=families.all_families(), ids=lambda row: row.key)
def row(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="session", params=STEPS, ids=lambda step: "-".join(map(str, step)))
def seen(request: pytest.FixtureRequest) -> Observation:
    """A step of every row in every mode. For the session, so that the tests of one step run one after another."""
    return observe(*request.param)
