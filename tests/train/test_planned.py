"""A run under a saved plan: the one that auto came to, in a run before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError
from lowtide.plan.costs import BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.saved_plan import load_plan, save_plan
from lowtide.plan.schedule import KEPT, SAVED
from lowtide.plan.solve import solve
from lowtide.testing import cpu_offload
from lowtide.train.report import result_lines, setting_name
from tests.auto.models import STEPS
from tests.train.test_auto import AUTO, Train, least_bytes

LONG = {"max_train_steps": STEPS, "checkpoint_step_interval": STEPS}
"""More steps than auto measures."""
PLANNED = AUTO | {"gradient_checkpointing_backend": None}


@pytest.mark.usefixtures("one_round")
def test_what_auto_came_to_is_where_another_run_begins(
    train: Train, output: Path, numbers: Callable[[Path], Any], photos: Path, tmp_path: Path
) -> None:
    for photo in photos.iterdir():
        if photo.stem not in ("galaxies", "photographer"):  # of one shape, so that every step counts
            photo.unlink()
    own = LONG | {"data_dir": str(photos), "cache_dir": str(tmp_path / "cache")}
    least = least_bytes(train, output_dir=str(output / "too-small"), **own)
    found = train(**AUTO | own, vram_budget=least + least // 50)
    assert found is not None
    assert not any("still measuring" in line for line in result_lines(found))
    file, learned = Path(found["files"]["plan"]), numbers(output)
    told = load_plan(file).conditions
    assert (told["model"], told["trained"], told["resolution"]) == ("Flux.1", "LoRA 4", "96")

    again = output / "again"
    report = train(**PLANNED | own, gradient_checkpointing_schedule=str(file), output_dir=str(again))
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


def test_a_plan_of_another_model_is_refused_before_the_first_sample(train: Train, output: Path, tmp_path: Path) -> None:
    moving = TreatmentCost(KEPT, frozenset({SAVED}), cpu_bytes=10, working_bytes=1, copied_bytes=10)
    kind = BlockKind(1.0, 2.0, (TreatmentCost(KEPT, kept_bytes=10), moving))
    costs = StepCosts({"a": kind}, {"blocks": ("a",) * 5}, 0, link=LinkRates(1.0, 1.0))
    save_plan(tmp_path / "plan.json", solve(costs, 45))
    keys = {"gradient_checkpointing_schedule": str(tmp_path / "plan.json"), "validation_disable": False}
    with cpu_offload(), pytest.raises(ConfigError, match="the schedule is for stacks"):
        train(**PLANNED | keys)
    assert not output.exists(), "nothing is left of a run that could not begin"
    with pytest.raises(ConfigError, match="some activations wait in CPU memory, and torch sees no accelerator"):
        train(**PLANNED | keys)


def test_a_plan_is_part_of_what_a_fresh_start_moves_aside(train: Train, output: Path) -> None:
    train()
    (output / "plan.json").write_text("{}")
    train(resume_from_checkpoint="false", max_train_steps=2)
    assert not (output / "plan.json").exists() and (output / "earlier-1" / "plan.json").exists()


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


def test_a_run_that_differs_from_what_a_plan_was_made_for_is_told(
    train_and_tell: Callable[..., Any], tmp_path: Path
) -> None:
    kind = BlockKind(1.0, 2.0, (TreatmentCost(KEPT, kept_bytes=10),))
    depths = {"transformer_blocks": 4, "single_transformer_blocks": 8}
    costs = StepCosts({"a": kind}, {name: ("a",) * depth for name, depth in depths.items()}, 0)
    alike = {"trained": "LoRA 4", "optimizer": "adamw", "B": "2", "W": "96", "H": "96"}
    alike |= {"accumulation": "1", "precision": "float32"}
    other = {
        "trained": "LoRA 2",
        "optimizer": "sgd, EMA",
        "B": "1",
        "W": "64",
        "accumulation": "2",
        "precision": "bf16",
        "trained_parameters": "57344",
        "T": "512",
    }
    path = tmp_path / "plan.json"
    keys = PLANNED | {"gradient_checkpointing_schedule": str(path), "max_train_steps": 1}
    for conditions, said in (
        (alike, ()),
        ({"resolution": "96", "train_batch_size": "2", "mixed_precision": "no"}, ()),
        (
            alike | other,
            (
                "64x96 pixels (this run: about 96x96)", "LoRA 2 (this run: LoRA 4)", "batch 1 (this run: 2)",
                "accumulation 2 (this run: 1)", "optimizer sgd, EMA (this run: adamw)", "bf16 (this run: float32)",
                "trained parameters: 57344 (this run: ", "text tokens: 512 (this run: ",
            ),
        ),
        ({"resolution": "64"}, ("resolution 64 (this run: 96)",)),
    ):  # fmt: skip
        save_plan(path, solve(costs, 10**6), conditions)
        _, told = train_and_tell(**keys, resume_from_checkpoint="false")
        assert ("was made for" in told) == bool(said)
        for words in said:
            assert words in told


def test_a_plan_in_the_output_folder_stays_where_it_is(train: Train, output: Path) -> None:
    kind = BlockKind(1.0, 2.0, (TreatmentCost(KEPT, kept_bytes=10),))
    depths = {"transformer_blocks": 4, "single_transformer_blocks": 8}
    costs = StepCosts({"a": kind}, {name: ("a",) * depth for name, depth in depths.items()}, 0)
    train(**PLANNED, max_train_steps=1)
    path = output / "plan.json"
    save_plan(path, solve(costs, 10**6))
    report = train(
        **PLANNED, gradient_checkpointing_schedule=str(path), max_train_steps=1, resume_from_checkpoint="false"
    )
    assert report is not None and report["checkpointing"] == "plan plan.json"
    assert path.exists() and (output / "earlier-1" / "report.json").exists()
