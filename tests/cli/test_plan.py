"""``lowtide plan``: a budget in, a schedule and its reasons out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.plan.saved_plan import load_plan

GIB = 2**30
SD3 = ("plan", "sd3", "--card", "4090", "--no-fits", "--host-memory", "none")


def test_a_plan_as_json(lowtide_json: Callable[..., Any]) -> None:
    result = lowtide_json(*SD3, "--budget", "6GiB", "--batch", "4", "--lora-rank", "8")
    assert result["model"] == "SD3 medium"
    assert (result["sizes"]["B"], result["card"], result["budget_bytes"]) == (4, "RTX 4090", 6 * GIB)
    plan = result["plan"]
    assert plan["predicted"]["peak_bytes"] <= 6 * GIB
    assert plan["leave_it_off"] is False and plan["source"] == "forecast"
    assert {other["verdict"] for other in plan["alternatives"] if other["name"] == "no checkpointing"} == {
        "over the budget"
    }
    blocks = [line["last"] - line["first"] + 1 for line in plan["stacks"]["transformer_blocks"]]
    assert sum(blocks) == 24
    assert result["residents"]["total_bytes"] < result["smallest_peak_bytes"] <= plan["predicted"]["peak_bytes"]


def test_it_may_say_leave_it_off(lowtide_json: Callable[..., Any]) -> None:
    plan = lowtide_json(*SD3, "--budget", "24 GB", "--batch", "1")["plan"]
    assert plan["leave_it_off"] is True
    assert plan["predicted"]["recomputing_ms"] == 0


def test_words_say_what_is_done_and_what_was_rejected(lowtide: Callable[..., Any]) -> None:
    done = lowtide(*SD3, "--budget", "8GiB", "--resolution", "1024x768")
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    for said in ("width 1024, height 768", "times as on RTX 4090", "A step takes", "no checkpointing: peak"):
        assert said in text
    assert "Times are forecast from shapes, not measured" in text


def test_nothing_fits_is_exit_code_one_and_names_the_smallest_peak(lowtide: Callable[..., Any]) -> None:
    done = lowtide(*SD3, "--budget", "1GiB", "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 1
    assert result["plan"] is None
    assert "the smallest peak that can be reached" in result["refused"]


def test_a_saved_plan_can_be_read(lowtide: Callable[..., Any], tmp_path: Path) -> None:
    done = lowtide(*SD3, "--budget", "6GiB", "--save", str(tmp_path / "plan.json"))
    assert done.exit_code == 0
    saved = load_plan(tmp_path / "plan.json")
    assert saved.conditions["card"] == "RTX 4090"
    assert saved.schedule.stacks["transformer_blocks"].depth == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "much"), "'much' is not a size"),
        (("--budget", "8GiB", "--resolution", "1024x"), "--resolution '1024x' is not allowed"),
        (("--budget", "8GiB", "--frames", "9"), "unknown size FR"),
        (("--budget", "8GiB", "--card", "5900"), "unknown card '5900'"),
    ],
)
def test_wrong_words_are_one_message(arguments: tuple[str, ...], message: str, lowtide: Callable[..., Any]) -> None:
    done = lowtide("plan", "sd3", "--no-fits", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
