"""Sizes that models can take: from rows and configurations, against what the forwards say."""

import pytest

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families.row import Build
from lowtide.measure.allowed import Allowed, allowed_sizes, check_sizes
from lowtide.measure.build import open_target


def _allowed(key: str) -> dict[str, Allowed]:
    target = open_target(key, "real", device="meta")
    assert target.build is not None
    return allowed_sizes(target.build, dict(target.model.config))


@pytest.mark.parametrize(
    ("key", "side", "frames"),
    [
        ("wan21_1_3b", 16, Allowed(4, 1)),  # diffusers' pipelines say the same
        ("hunyuan_video", 16, Allowed(4, 1)),
        ("ltx_video_095", 32, Allowed(8, 1)),
        ("mochi", 16, Allowed(6, 1)),
        ("flux1", 16, None),  # the family packs the patches
        ("qwen_image", 16, None),
        ("sd3_medium", 16, None),
        ("sana", 32, None),
        ("sdxl", 8, None),
    ],
)
def test_of_rows(key: str, side: int, frames: Allowed | None) -> None:
    found = _allowed(key)
    assert found["H"] == found["W"] == Allowed(side)
    assert found.get("FR") == frames


def test_a_row_that_rounds_up_takes_any_side() -> None:
    row = families.find("stable_cascade_c")
    assert allowed_sizes(row.real, row.real.config) == {}


@pytest.mark.parametrize("row", families.all_families(), ids=lambda row: row.key)
def test_the_sizes_of_rows_are_allowed(row: families.Family) -> None:
    """But for the frames that the public sweep gave HunyuanVideo 1.5."""
    for build in (row.tiny, row.real):
        sizes = {name: size for name, size in build.vars.items() if (row.key, name) != ("hunyuan_video_15", "FR")}
        check_sizes(sizes, allowed_sizes(build, build.config))


def test_patches_of_a_configuration_count_where_the_model_cuts_them() -> None:
    build = Build({}, {"H": 64}, {"h": "H//8"}, {"x": {"shape": ["B", "h", "h"]}})
    packed = Build({}, {"H": 64}, {"h": "H//8", "S": "h*h"}, {"x": {"shape": ["B", "S"]}})
    config = {"patch_size": (1, 4, 2)}
    assert allowed_sizes(build, config) == {"H": Allowed(32)}
    assert allowed_sizes(packed, config) == {"H": Allowed(8)}


def test_the_nearest_are_told() -> None:
    with pytest.raises(ConfigError, match=r"frames 80 is not allowed: .* multiple of 4 plus 1\. The nearest: 77 or 81"):
        check_sizes({"FR": 80}, {"FR": Allowed(4, 1)})
    with pytest.raises(ConfigError, match=r"height 7 .* The nearest: 16$"):
        check_sizes({"H": 7}, {"H": Allowed(16)})
    check_sizes({"FR": 1, "H": 16, "B": 3}, {"FR": Allowed(4, 1), "H": Allowed(16)})
