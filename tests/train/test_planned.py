"""A run under a saved plan: the one that auto came to, in a run before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.plan.saved_plan import load_plan
from lowtide.train.report import result_lines, setting_name
from tests.train.test_auto import AUTO, Train, least_bytes

LONG = {"max_train_steps": 30, "checkpoint_step_interval": 30}
"""More steps than auto measures: those with smaller pictures do not count."""
PLANNED = AUTO | {"gradient_checkpointing_backend": None}


def test_what_auto_came_to_is_where_another_run_begins(
    train: Train, output: Path, numbers: Callable[[Path], Any]
) -> None:
    least = least_bytes(train, output_dir=str(output / "too-small"))
    found = train(**AUTO | LONG, vram_budget=least + least // 50)
    assert found is not None
    file, learned = Path(found["files"]["plan"]), numbers(output)
    assert load_plan(file).conditions == {"found by": "auto", "family": "flux1"}

    again = output / "again"
    report = train(**PLANNED | LONG, gradient_checkpointing_schedule=str(file), output_dir=str(again))
    assert report is not None
    assert numbers(again) == learned
    assert report["recomputed_blocks"] == found["recomputed_blocks"]
    assert report["recomputed_blocks"]["receipt"]
    assert report["checkpointing"] == "plan plan.json"
    assert "plan" not in report["files"]
    (ran,) = (entry for entry in report["settings"] if entry["ran"])
    assert ran["scope"] == "plan" and setting_name(ran["keys"]) == "plan plan.json"
    assert any("exactly those that the setting asks for" in line for line in result_lines(report))
    assert report["config"]["gradient_checkpointing_schedule"] == str(file.resolve())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gradient_checkpointing_schedule": "/nowhere.json"}, "no plan can be read from /nowhere.json"),
        ({"gradient_checkpointing_schedule": "x", "gradient_checkpointing_interval": 2}, "leave .*_interval out"),
        ({"gradient_checkpointing_schedule": "x", "gradient_checkpointing_backend": "auto"}, "leave .*_backend out"),
        ({"gradient_checkpointing_schedule": "x", "gradient_checkpointing": False}, "leave gradient_checkpointing out"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    train: Train, output: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**PLANNED | keys)
    assert not output.exists()
