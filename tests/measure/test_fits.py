"""What would just fit, from peaks that are made up: how near the true one, and how many looks it takes."""

from collections.abc import Callable, Mapping

import pytest

from lowtide.measure.allowed import Allowed
from lowtide.measure.fits import Asked, Fit, what_fits

BUDGET = 1000


class MadeUp:
    """A model with a peak for each rank and sizes; what cannot run has none."""

    def __init__(
        self, peak: Callable[[int | None, Mapping[str, int]], int], resident_bytes: int, adapter_bytes: int = 0
    ):
        self._peak, self._resident_bytes, self._adapter_bytes = peak, resident_bytes, adapter_bytes
        self.looks: set[tuple] = set()

    def smallest_peak(self, rank: int | None, sizes: Mapping[str, int]) -> int:
        self.looks.add((rank, *sizes.values()))
        return self._peak(rank, sizes)

    def step_ms(self, rank: int | None, sizes: Mapping[str, int]) -> float:
        return float(self._peak(rank, sizes))

    def resident_bytes(self) -> int:
        return self._resident_bytes

    def adapter_bytes(self) -> int:
        return self._adapter_bytes


def _fits(model: MadeUp, sizes: Mapping[str, int], rank: int | None = None, **allowed: Allowed) -> dict[str, Fit]:
    return {fit.name: fit for fit in what_fits(model, Asked(sizes, rank, BUDGET), allowed)}


@pytest.mark.parametrize("bytes_each", [7, 43, 90, 300])
@pytest.mark.parametrize("asked", [1, 4, 30])
def test_what_grows_evenly_is_found_exactly_in_three_looks(bytes_each: int, asked: int) -> None:
    model = MadeUp(lambda rank, sizes: 200 + bytes_each * sizes["B"], 200)
    fit = _fits(model, {"B": asked})["batch"]
    assert int(fit.largest) == min(800 // bytes_each, 16 * asked)
    assert fit.at_least == (800 // bytes_each >= 16 * asked)
    assert len(model.looks) <= 3
    assert fit.step_ms == 200 + bytes_each * int(fit.largest)


def test_what_grows_unevenly_is_found_nearly() -> None:
    model = MadeUp(lambda rank, sizes: 100 + 10 * sizes["B"] + sizes["B"] ** 2 // 4, 100)
    largest = int(_fits(model, {"B": 3})["batch"].largest)
    assert 100 + 10 * largest + largest**2 // 4 <= BUDGET and largest >= 42  # 43 is the true one
    assert len(model.looks) <= 6


def test_not_even_one() -> None:
    fit = _fits(MadeUp(lambda rank, sizes: 2000 + sizes["B"], 2000), {"B": 2})["batch"]
    assert (fit.largest, fit.at_least, fit.step_ms) == ("0", False, None)


def test_what_cannot_run_does_not_fit() -> None:
    def peak(rank: int | None, sizes: Mapping[str, int]) -> int:
        if sizes["B"] > 20:
            raise ValueError("too long")
        return 100 + sizes["B"]

    assert 16 <= int(_fits(MadeUp(peak, 100), {"B": 8})["batch"].largest) <= 20


def test_frames_are_of_those_that_the_model_takes() -> None:
    model = MadeUp(lambda rank, sizes: 10 * sizes["FR"], 0)
    fit = _fits(model, {"FR": 17}, FR=Allowed(8, 1))["frames"]
    assert fit.largest == "97" and {looks[1] % 8 for looks in model.looks} == {1}


def test_a_picture_keeps_its_shape_in_whole_steps() -> None:
    model = MadeUp(lambda rank, sizes: sizes["H"] * sizes["W"] // 4096, 0)
    fit = _fits(model, {"H": 512, "W": 1024}, H=Allowed(16), W=Allowed(16))["resolution"]
    width, height = map(int, fit.largest.split("x"))
    assert (width % 64, height % 64) == (0, 0) and 1.7 < width / height < 2.3
    assert 850 <= width * height // 4096 <= 1000
    assert fit.asked == "1024x512"


def test_the_largest_rank_that_is_looked_for_is_at_least_that() -> None:
    model = MadeUp(lambda rank, sizes: 100 + (rank or 0) // 4, 104, 4)
    fit = _fits(model, {}, rank=16)["rank"]
    assert (fit.largest, fit.at_least) == ("1024", True)
    narrow = MadeUp(lambda rank, sizes: 100 + 3 * (rank or 0), 148, 48)
    assert _fits(narrow, {}, rank=16)["rank"] == Fit("rank", "16", "300", step_ms=1000.0)
