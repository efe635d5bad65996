"""``lowtide plan``: a budget in, a schedule and its reasons out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide import families
from lowtide.measure.build import build_model
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
    for said in ("width 1024, height 768", "times as on RTX 4090", "A step takes", "more: ", "(slower)"):
        assert said in text
    assert "Times are forecast from shapes, not measured" in text


def test_nothing_fits_is_exit_code_one_and_names_the_smallest_peak(lowtide: Callable[..., Any]) -> None:
    done = lowtide(*SD3, "--budget", "1GiB", "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 1
    assert result["plan"] is None
    assert "the smallest peak that can be reached" in result["refused"]


def test_frames_that_a_video_model_cannot_take(lowtide: Callable[..., Any]) -> None:
    done = lowtide("plan", "wan21_1_3b", "--no-fits", "--budget", "16GiB", "--frames", "80")
    assert done.exit_code == 2
    assert "frames 80 is not allowed: this model takes a multiple of 4 plus 1. The nearest: 77 or 81" in done.stderr


def test_a_plan_for_all_weights_says_so(lowtide: Callable[..., Any], tmp_path: Path) -> None:
    done = lowtide(*SD3, "--budget", "80GiB", "--full", "--save", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.stderr
    assert load_plan(tmp_path / "plan.json").conditions["trained"] == "all weights"
    assert "trained: all weights" in " ".join(done.stdout.split())


def test_few_tokens_are_told_where_something_is_recomputed(lowtide_json: Callable[..., Any]) -> None:
    few = lowtide_json(*SD3, "--budget", "5GiB", "--resolution", "256", "--batch", "16")
    assert not few["plan"]["leave_it_off"]
    assert [said for said in few["warnings"] if "A block has 589 tokens at most. Under 2,048" in said]
    assert lowtide_json(*SD3, "--budget", "24GiB", "--resolution", "256")["warnings"] == []  # which leaves all off


def test_a_budget_that_the_card_does_not_have(lowtide: Callable[..., Any], lowtide_json: Callable[..., Any]) -> None:
    said = "The budget, 25.0 GiB, is more than RTX 4090 has: 24.0 GiB."
    assert said in " ".join(lowtide(*SD3, "--budget", "25GiB").stdout.split())
    assert lowtide_json(*SD3, "--budget", "25GiB")["warnings"] == [said]
    assert lowtide_json(*SD3, "--budget", "24GiB")["warnings"] == []


def test_what_is_looked_for_ends_somewhere(lowtide: Callable[..., Any]) -> None:
    arguments = ("plan", "sd3", "--card", "H200", "--budget", "100GiB", "--resolution", "64", "--batch", "1")
    done = lowtide(*arguments, "--host-memory", "none")
    assert "batch: at least 16 (asked: 1)" in done.stdout and "rank: at least 1024 (asked: 16)" in done.stdout
    assert "resolution: at least 256x256 (asked: 64x64)" in done.stdout
    assert done.stderr == ""  # progress is for terminals


def test_progress_is_told_on_a_terminal(process: Callable[..., Any]) -> None:
    done = process("-m", "lowtide", *SD3, "--budget", "24GiB", env={"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"})
    assert done.returncode == 0
    assert "tracing a step: B 3, H 1024" in done.stderr and "tracing" not in done.stdout


def test_a_saved_plan_can_be_read(lowtide: Callable[..., Any], tmp_path: Path) -> None:
    done = lowtide(*SD3, "--budget", "6GiB", "--save", str(tmp_path / "plan.json"))
    assert done.exit_code == 0
    saved = load_plan(tmp_path / "plan.json")
    assert saved.conditions["card"] == "RTX 4090"
    assert saved.conditions["trained"] == "LoRA 16" and int(saved.conditions["trained_parameters"]) > 10**6
    assert "It is for LoRA 16, bf16 autocast, the sizes above, and an update after each backward" in " ".join(
        done.stderr.split()
    )
    assert saved.schedule.stacks["transformer_blocks"].depth == 24


def test_a_place_that_cannot_be_written_to_is_told_before_planning(
    lowtide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*_: Any, **__: Any) -> None:
        raise AssertionError("planned for nothing")

    monkeypatch.setattr("lowtide.measure.planning.plan_for", planned)
    done = lowtide(*SD3, "--budget", "6GiB", "--save", str(tmp_path / "no" / "plan.json"))
    assert (done.exit_code, done.stdout) == (3, "")
    assert "its folder does not exist" in " ".join(done.stderr.split())


def test_an_answer_is_shown_where_the_disk_is_full_in_the_end(
    lowtide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    done = lowtide(*SD3, "--budget", "6GiB", "--save", str(tmp_path / "plan.json"))
    assert done.exit_code == 3 and "A schedule for a budget of 6.00 GiB" in done.stdout
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "much"), "--budget 'much' is not allowed; allowed: a size such as 16GiB, or auto"),
        (
            ("--budget", "16"),
            "--budget '16' is 16 bytes, below 1MiB; allowed: a size such as 16GiB, or auto. Did you mean 16GiB?",
        ),
        (("--budget", "8GiB", "--resolution", "1000"), "width 1000 is not allowed: this model takes a multiple of 16"),
        (("--budget", "8GiB", "--resolution", "1000"), "The nearest: 992 or 1008"),
        (("--budget", "8GiB", "--full", "--lora-rank", "8"), "--full trains all weights: leave out one of them"),
        (("--budget", "8GiB", "--resolution", "1024x"), "--resolution '1024x' is not allowed"),
        (("--budget", "8GiB", "--frames", "9"), "unknown size FR (frames); this family has: B (batch), H (height)"),
        (("--budget", "8GiB", "--set", "T"), "--set 'T' is not allowed; expected NAME=N"),
        (("--budget", "8GiB", "--set", "B=2", "--batch", "2"), "B is given twice"),
        (("--budget", "8GiB", "--card", "5900"), "unknown card '5900'"),
    ],
)
def test_wrong_words_are_one_message(arguments: tuple[str, ...], message: str, lowtide: Callable[..., Any]) -> None:
    done = lowtide("plan", "sd3", "--no-fits", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_a_folder_is_planned_for_the_inputs_of_its_family(
    lowtide: Callable[..., Any], lowtide_json: Callable[..., Any], tmp_path: Path
) -> None:
    row = families.find("flux1")
    build_model(row, "tiny").save_config(tmp_path)  # no weights
    plan = ("plan", str(tmp_path), "--no-fits", "--card", "4090", "--budget", "24GiB")
    sizes = lowtide_json(*plan)["sizes"]
    assert {name: sizes[name] for name in "BHWT"} == {name: row.real.vars[name] for name in "BHWT"}
    assert {name: sizes[name] for name in "CEP"} == {name: row.tiny.vars[name] for name in "CEP"}
    heading = "batch 1, width 1024, height 1024, text tokens 512"
    assert heading in " ".join(lowtide(*plan).stdout.split())
    assert lowtide_json(*plan, "--set", "T=77", "--batch", "2")["sizes"] == sizes | {"T": 77, "B": 2}


def test_cpu_memory_is_told_and_where_it_binds(lowtide: Callable[..., Any], lowtide_json: Callable[..., Any]) -> None:
    plan = ("plan", "sd3", "--card", "4090", "--no-fits", "--budget", "5.5GiB", "--set", "T=154", "--host-memory")
    bound = lowtide_json(*plan, "1GiB")
    assert bound["host_limit_bytes"] == GIB and bound["host_limit_binds"] is True
    assert bound["plan"]["predicted"]["cpu_bytes"] <= GIB < bound["without_host_limit"]["cpu_bytes"]
    assert bound["without_host_limit"]["step_ms"] < bound["plan"]["predicted"]["step_ms"]
    free = lowtide_json(*plan, "none")
    assert free["host_limit_bytes"] is None and free["host_limit_binds"] is False
    said = " ".join(lowtide(*plan, "1GiB").stdout.split())
    assert "CPU memory for what moves: up to 1.00 GiB." in said and "CPU memory binds this plan: with " in said
    assert "Peaks hold with PYTORCH_ALLOC_CONF=expandable_segments:True" in said


def test_without_cpu_memory_nothing_moves(lowtide_json: Callable[..., Any]) -> None:
    plan = ("plan", "sd3", "--card", "4090", "--no-fits", "--budget", "8GiB", "--host-memory")
    nothing, much = (lowtide_json(*plan, size)["plan"]["predicted"] for size in ("0", "none"))
    assert nothing["cpu_bytes"] == 0 < much["cpu_bytes"]
    assert nothing["step_ms"] > much["step_ms"]


def test_a_card_without_bfloat16_is_named_and_not_advised(lowtide: Callable[..., Any]) -> None:
    told = lowtide("plan", "sd3", "--no-fits", "--budget", "12GiB", "--card", "V100")
    assert "V100 does not compute in bfloat16" in " ".join((told.stdout + told.stderr).split())
    refused = lowtide("plan", "sd3", "--no-fits", "--budget", "4GiB", "--card", "4090")
    assert "another card" in refused.stdout and "V100" not in refused.stdout and "T4" not in refused.stdout


def test_the_usual_limit_on_cpu_memory_is_told(lowtide: Callable[..., Any]) -> None:
    done = lowtide("plan", "sd3", "--no-fits", "--budget", "24GiB", "--card", "H200")
    assert "60% of this machine's, whatever the card; --host-memory sets it" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (
            ("--budget", "4GiB"),
            ("quantised base weights, which are not planned for: of 3.9", "another card, of", "RTX 3060"),
        ),
        (("--budget", "4.5GiB"), ("a smaller batch or resolution", "a larger --budget: this card, RTX 4090, has 2")),
        (
            ("--budget", "22GiB", "--full"),
            ("a LoRA instead", "adamw-fused: an update", "--optimizer adamw-8bit: 18.9 GiB less, which is enough"),
        ),
        (("--budget", "2GiB", "--full", "--optimizer", "sgd"), ("a LoRA instead",)),
    ],
)
def test_where_nothing_fits_it_says_what_can_help(
    arguments: tuple[str, ...], hints: tuple[str, ...], lowtide: Callable[..., Any]
) -> None:
    done = lowtide(*SD3, *arguments)
    said = " ".join(done.stdout.split()).partition("What can help:")[2]
    assert done.exit_code == 1
    for hint in hints:
        assert hint in said
    assert ("adamw-8bit" in said) == ("which is enough" in " ".join(hints))
    assert ("a smaller batch" in said) == ("4.5GiB" in arguments), "it cannot help below what is there throughout"


@pytest.fixture
def saved(lowtide: Callable[..., Any], tmp_path: Path) -> tuple[str, str]:
    """The folder of a small model, and a plan for it that recomputes, as everything else has no room."""
    folder, plan = tmp_path / "flux", tmp_path / "plan.json"
    build_model(families.find("flux1"), "tiny").save_pretrained(folder)
    options = ("plan", str(folder), "--no-fits", "--host-memory", "none")
    least = json.loads(lowtide(*options, "--budget", "2MiB", "--json").stdout)["smallest_peak_bytes"]
    assert lowtide(*options, "--budget", str(least + 20_000), "--save", str(plan)).exit_code == 0
    return str(folder), str(plan)


def test_inspect_and_verify_take_a_saved_plan(
    lowtide_json: Callable[..., Any], lowtide: Callable[..., Any], saved: tuple[str, str]
) -> None:
    folder, plan = saved
    wanted = load_plan(plan).schedule.stacks
    shown = lowtide_json("inspect", folder, "--plan", plan)
    assert shown["settings"] is None and shown["inert"] == shown["ignored"] == []
    for stack in shown["stacks"]:
        treatments = [block["treatment"].removesuffix("+offload") for block in stack["blocks"]]
        assert treatments == list(wanted[stack["name"]].treatments)
    assert any(treatment != "kept" for stack in wanted.values() for treatment in stack.treatments)
    proved = lowtide_json("verify", folder, "--plan", plan)
    assert proved["same"] is True and proved["settings"] is None
    treated = sum(treatment != "kept" for stack in wanted.values() for treatment in stack.treatments)
    assert proved["receipt"]["totals"]["recompute_calls"] == treated
    assert f"the plan in {plan}" in "".join(lowtide("verify", folder, "--plan", plan).stdout.split("\n"))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_plan_beside_settings_or_for_another_model(
    lowtide: Callable[..., Any], saved: tuple[str, str], command: str
) -> None:
    folder, plan = saved
    beside = lowtide(command, folder, "--plan", plan, "--interval", "2")
    assert beside.exit_code == 2 and "leave interval out" in beside.stderr
    other = lowtide(command, "sd3_medium", "--plan", plan)
    assert other.exit_code == 2 and "but this model has" in other.stderr
    missing = lowtide(command, folder, "--plan", f"{plan}.no")
    assert missing.exit_code == 2 and "no plan can be read from" in missing.stderr


def test_what_the_optimizer_keeps_counts(lowtide_json: Callable[..., Any], lowtide: Callable[..., Any]) -> None:
    def lying(*options: str) -> dict[str, int]:
        return lowtide_json(*SD3, "--budget", "80GiB", "--full", *options)["residents"]

    adamw, small, mean = lying(), lying("--optimizer", "AdamW-8bit"), lying("--optimizer", "sgd", "--ema")
    trained = adamw["gradients_bytes"]
    assert (adamw["states_bytes"], small["states_bytes"], mean["states_bytes"]) == (2 * trained, trained // 2, 0)
    assert (adamw["ema_bytes"], mean["ema_bytes"]) == (0, trained)
    wrong = lowtide(*SD3, "--budget", "8GiB", "--optimizer", "adam8bit")
    assert wrong.exit_code == 2
    assert "--optimizer: 'adam8bit' is not allowed; allowed: adamw, adamw-fused, adamw-8bit, lion" in wrong.stderr


def test_gradients_leave_their_room_to_activations_until_backward_makes_them(
    lowtide: Callable[..., Any], lowtide_json: Callable[..., Any]
) -> None:
    arguments = (*SD3, "--full", "--batch", "4", "--budget", "40GiB", "--optimizer", "adamw-fused")
    once, added_up = (lowtide_json(*arguments, "--accumulation", str(number)) for number in (1, 2))
    assert once["residents"] == added_up["residents"], "they are all there at the end of backward"
    assert once["smallest_peak_bytes"] <= added_up["smallest_peak_bytes"]
    assert once["plan"]["predicted"]["step_ms"] < added_up["plan"]["predicted"]["step_ms"]
    assert (
        once["late_gradients_bytes"]
        > 0.9 * once["residents"]["gradients_bytes"]
        > added_up["late_gradients_bytes"]
        == 0
    )
    said = "of gradients come as backward makes them, block by block"
    assert said in " ".join(lowtide(*arguments).stdout.split())
    summed = " ".join(lowtide(*arguments, "--accumulation", "2").stdout.split())
    assert said not in summed and "Gradients add up over 2 backwards." in summed


def test_what_an_update_takes_counts(lowtide_json: Callable[..., Any], lowtide: Callable[..., Any]) -> None:
    """torch's AdamW makes as much as the weights take, unless it is fused."""
    arguments = (*SD3, "--full", "--budget", "60GiB")
    plain, fused = (lowtide_json(*arguments, "--optimizer", name) for name in ("adamw", "adamw-fused"))
    assert plain["residents"] == fused["residents"]
    assert (plain["update_bytes"], fused["update_bytes"]) == (plain["residents"]["gradients_bytes"], 0)
    assert plain["smallest_peak_bytes"] == plain["residents"]["total_bytes"] + plain["update_bytes"]
    assert fused["smallest_peak_bytes"] < plain["smallest_peak_bytes"]
    assert "An update by adamw takes 7.5" in " ".join(lowtide(*arguments).stdout.split())


def test_autocast_is_wider_than_bfloat16(lowtide_json: Callable[..., Any]) -> None:
    """Norms compute in float32 there; where all weights are trained, casts of weights are saved, too."""
    for options in ((), ("--full",)):
        wide, narrow = (lowtide_json(*SD3, "--budget", "80GiB", *options, *how) for how in ((), ("--no-autocast",)))
        assert (wide["precision"], narrow["precision"]) == ("bf16 autocast", "bf16")
        kept = [one["plan"]["predicted"]["peak_bytes"] - one["residents"]["total_bytes"] for one in (wide, narrow)]
        assert kept[0] > 1.2 * kept[1]
    assert (
        narrow["residents"]["states_bytes"]
        == 2 * narrow["residents"]["gradients_bytes"]
        == wide["residents"]["states_bytes"] // 2
    )
