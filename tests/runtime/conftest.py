"""Offload without an accelerator, for the files that ask for it."""

from collections.abc import Iterator

import pytest

from lowtide import testing
from tests.runtime.links import LateLink, use_link


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with testing.cpu_offload():
        yield


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateLink:
    """The link of every store of the test; its copies run as late as they may."""
    link = LateLink()
    use_link(monkeypatch, link)
    return link


@pytest.fixture
def no_violations(late: LateLink) -> Iterator[None]:
    """At the end of the test, no copy was one from or to memory that had been freed."""
    yield
    late.finish()
    assert late.violations == []
