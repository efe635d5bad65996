"""Fixtures of the contract suite; see cases.py, modes.py and observed.py."""

import os
from collections.abc import Iterator

import pytest
import torch

from lowtide import families
from lowtide.families import Family
from tests.contract.modes import ALL, FEW, Mode, Observation, observe

THOROUGH = {"flux1", "flux2", "sd3_medium", "sdxl", "pixart_sigma", "sana", "qwen_image", "lumina2"} | {
    "wan21_1_3b",
    "ltx_video_095",
    "z_image_turbo",
}
"""Rows whose blocks differ most from each other. They run every mode; any other row runs a fifth of them, neighbours
different ones. With LOWTIDE_EVERY_MODE=1 in the environment every row runs every mode (half an hour)."""

EVERY_MODE = os.environ.get("LOWTIDE_EVERY_MODE", "0") not in ("", "0")


def _steps() -> Iterator[tuple[str, Mode, str]]:
    for number, row in enumerate(families.all_families()):
        thorough = EVERY_MODE or row.key in THOROUGH
        yield from ((row.key, mode, "full") for mode in (ALL if thorough else ALL[number % 5 :: 5]))
        yield from ((row.key, mode, "lora") for mode in (FEW if thorough else FEW[number % 7 :: 7]))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=families.all_families(), ids=lambda row: row.key)
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
