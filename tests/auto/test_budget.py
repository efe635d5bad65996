"""The limit that holds PyTorch's allocator to a budget, on a card that is played."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.allocator import EARLIER, SETTINGS, VARIABLES
from lowtide.auto import budget
from lowtide.auto.budget import Limit

GIB, PAGE = 2**30, 12 * 2**20
CARD, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


@dataclass
class Allocator:
    shares: dict[torch.device, float] = field(default_factory=lambda: {CARD: 0.9, OTHER: 1.0})
    expanding: list[str] = field(default_factory=list)

    def set_share(self, share: float, device: torch.device) -> None:
        self.shares[device] = share


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    played = Allocator()
    known: dict[str, Any] = {
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=100 * GIB),
        "get_per_process_memory_fraction": played.shares.__getitem__,
        "set_per_process_memory_fraction": played.set_share,
        "get_allocator_backend": lambda: "native",
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in budget._SETTERS:
        monkeypatch.setattr(torch._C, name, played.expanding.append, raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return played


def test_no_more_is_taken_than_the_budget_though_pages_are_taken_whole(allocator: Allocator) -> None:
    limit = Limit(CARD, 30 * GIB)
    assert allocator.shares[CARD] * 100 * GIB == pytest.approx(30 * GIB - PAGE)
    limit.lift()
    assert allocator.shares == {CARD: 0.9, OTHER: 1.0}
    assert allocator.expanding == [SETTINGS, EARLIER]


def test_with_somebodys_own_settings_pages_are_as_large_as_pytorch_has_them(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[0], "expandable_segments:True")
    limit = Limit(CARD, 30 * GIB)
    assert allocator.shares[CARD] * 100 * GIB == pytest.approx(30 * GIB - 20 * 2**20)
    limit.lift()


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_of_several_limits_of_a_card_the_lowest_holds_until_it_goes(
    allocator: Allocator, first_goes_first: bool
) -> None:
    limits = [Limit(CARD, 50 * GIB), Limit(CARD, 30 * GIB)]
    elsewhere = Limit(OTHER, 20 * GIB)
    assert allocator.shares[CARD] * 100 * GIB == pytest.approx(30 * GIB - PAGE)
    gone, stays = limits if first_goes_first else limits[::-1]
    gone.lift()
    assert allocator.shares[CARD] * 100 * GIB == pytest.approx((30 if stays is limits[1] else 50) * GIB - PAGE)
    assert allocator.expanding[-1] == SETTINGS
    stays.lift()
    assert allocator.shares[CARD] == 0.9
    assert allocator.expanding[-1] == SETTINGS
    elsewhere.lift()
    assert allocator.shares == {CARD: 0.9, OTHER: 1.0}
    assert allocator.expanding[-1] == EARLIER


def test_a_process_that_is_held_to_less_already_stays_so(allocator: Allocator) -> None:
    allocator.shares[CARD] = 0.1
    limit = Limit(CARD, 30 * GIB)
    assert allocator.shares[CARD] == 0.1
    limit.lift()
    assert allocator.shares[CARD] == 0.1


def test_on_the_cpu_nothing_is_limited(allocator: Allocator) -> None:
    Limit(torch.device("cpu"), GIB).lift()
    assert allocator.shares == {CARD: 0.9, OTHER: 1.0} and allocator.expanding == []


@pytest.mark.parametrize("name", VARIABLES)
def test_somebodys_own_settings_of_the_allocator_stay(
    name: str, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    Limit(CARD, 30 * GIB).lift()
    assert allocator.expanding == []
    assert budget.runs_out_early()
    monkeypatch.setenv(name, SETTINGS)
    assert not budget.runs_out_early()
    monkeypatch.setattr("sys.platform", "win32")  # which has no expandable segments
    assert budget.runs_out_early()


def test_torch_knows_the_settings() -> None:
    """It says nothing of a key that it does not know; smaller pages than these it refuses."""
    change = next(vars(torch._C)[name] for name in budget._SETTERS if name in vars(torch._C))
    try:
        change(SETTINGS)
        with pytest.raises(ValueError, match="large_segment_size_mb"):
            change(SETTINGS.replace(":12", ":10"))
    finally:
        change(EARLIER)
