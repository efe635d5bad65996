"""``gradient_checkpointing_backend: auto`` in a run of the trainer: it learns the same, and says what it chose."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.testing import cpu_offload
from lowtide.train.report import result_lines

AUTO = {
    "gradient_checkpointing_backend": "auto",
    "gradient_checkpointing_interval": None,
    "gradient_checkpointing_segment_stride": None,
    "gradient_checkpointing_offload_min_bytes": 1,
}
Train = Callable[..., dict[str, Any] | None]


def least_bytes(train: Train, **over: Any) -> int:
    """The smallest budget, as the error of too small a one names it."""
    with pytest.raises(ConfigError) as caught:
        train(**AUTO | over, vram_budget="1MiB")
    found = re.search(r"the smallest peak that can be reached is .*?\((\d+) bytes\)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("offload", [False, True])
def test_it_learns_exactly_what_every_setting_learns(
    train: Train, output: Path, numbers: Callable[[Path], Any], whole: Any, offload: bool
) -> None:
    def tight() -> dict[str, Any] | None:
        least = least_bytes(train, output_dir=str(output / "too-small"))
        return train(**AUTO, vram_budget=least + least // 50, max_train_steps=5)

    if offload:
        with cpu_offload():
            report = tight()
    else:
        report = tight()
    assert numbers(output) == whole
    assert report is not None
    assert report["checkpointing"] == "auto"
    blocks = report["recomputed_blocks"]
    assert blocks["as_expected"] and blocks["receipt"]
    (ran,) = (entry for entry in report["settings"] if entry["ran"])
    assert ran["scope"] == "auto" and ran["keys"]["gradient_checkpointing_backend"] == "auto"
    assert ran["recomputed"] == len(blocks["receipt"])
    off = report["settings"][0]
    assert off["keys"]["gradient_checkpointing"] is False and ran["held_bytes"] < off["held_bytes"]
    assert any("exactly those of the plan that auto chose" in line for line in result_lines(report))
    assert any("auto was still measuring, so no plan is written" in line for line in result_lines(report))


def test_where_the_plain_run_fits_nothing_is_recomputed(train: Train) -> None:
    report = train(**AUTO, vram_budget="64GiB")
    assert report is not None
    assert report["recomputed_blocks"] == {"expected": [], "receipt": [], "as_expected": True}


def test_what_auto_does_is_told(train_and_tell: Callable[..., tuple[dict[str, Any] | None, str]]) -> None:
    _, told = train_and_tell(**AUTO, vram_budget="64GiB")
    assert re.search(r"auto: to begin with, from shapes: 12 kept; peak .* of .*, \d+ ms", told)
    assert logging.getLogger("lowtide").handlers == []
