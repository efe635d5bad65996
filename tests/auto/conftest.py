"""Offload that the CPU simulates, for the tests of ``auto`` that say so."""

from collections.abc import Iterator

import pytest

from lowtide.testing import cpu_offload


@pytest.fixture
def offload() -> Iterator[None]:
    with cpu_offload():
        yield
