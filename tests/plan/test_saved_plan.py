"""Plans in words, as data, and as files."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.errors import ConfigError, MachineError
from lowtide.plan.answer import Alternative, Plan
from lowtide.plan.costs import FORECAST, BlockKind, LinkRates, StepCosts, TreatmentCost
from lowtide.plan.explain import CHOSEN, SLOWER, TOO_MUCH, as_dict, in_words
from lowtide.plan.saved_plan import check_place, dumps, load_plan, loads, save_plan
from lowtide.plan.schedule import ATTENTION, BOUNDARY, FFN, KEPT, WHOLE
from lowtide.plan.solve import smallest_peak, solve
from lowtide.testing import cpu_offload
from tests.plan.chains import steps
from tests.runtime.toys import chain, inputs

MIB = 2**20


def _step(source: str = "measured") -> StepCosts:
    ways = (
        TreatmentCost(KEPT, kept_bytes=100 * MIB, working_bytes=10 * MIB),
        TreatmentCost(FFN, frozenset({BOUNDARY, ATTENTION}), 1, 0.1, 1.0, 20 * MIB, 50 * MIB, 60 * MIB, 50 * MIB),
        TreatmentCost(WHOLE, extra_backward_ms=4.0, kept_bytes=10 * MIB, working_bytes=100 * MIB),
        TreatmentCost(WHOLE, blocks=2, extra_backward_ms=8.0, kept_bytes=10 * MIB, working_bytes=190 * MIB),
    )
    kind = BlockKind(4.0, 8.0, ways)
    return StepCosts({"b": kind}, {"blocks": ("b",) * 6}, 1000 * MIB, link=LinkRates(20, 20), source=source)


def _moving_step() -> StepCosts:
    """Blocks that are recomputed whole or kept; their inputs can move."""
    plain, moving, whole, _ = _step().kinds["b"].treatments
    kind = BlockKind(4.0, 8.0, (plain, whole, replace(moving, treatment=WHOLE, moves=frozenset({BOUNDARY}))))
    return StepCosts({"b": kind}, {"blocks": ("b",) * 6}, 1000 * MIB, link=LinkRates(20, 20))


def _plan(budget_mib: int = 1320) -> Plan:
    return solve(_step(), budget_mib * MIB)


# ---------------------------------------------------------------------- words


def test_a_plan_in_words() -> None:
    assert in_words(_plan()).splitlines() == [
        "A schedule for a budget of 1.29 GiB: peak 1.23 GiB.",
        "blocks:",
        "  blocks 0–4: feed-forward side recomputed; in CPU memory: the inputs of the feed-forward side and what the "
        "attention side saves",
        "  block 5: kept on the device",
        "A step takes 77.5 ms: 72.0 ms without checkpointing, 5.5 ms (+7.6 %) for computing again and copying.",
        "250 MiB are copied out, and as much back; 250 MiB wait in CPU memory.",
        "The peak is in backward at block 5 of blocks: 1.17 GiB are held (weights and the like included), 10.0 MiB are "
        "worked on, 52.0 MiB are in flight.",
        "Compared with, and not taken:",
        "  torch: peak 1.13 GiB, 96.0 ms (slower)",
        "  torch, interval 2: peak 1.19 GiB, 96.0 ms (slower)",
        "  no checkpointing: peak 1.57 GiB, 72.0 ms (over the budget)",
        "  torch, interval 2, stride 4: peak 1.38 GiB, 88.0 ms (over the budget)",
    ]


def test_leaving_it_off_and_a_fixed_setting_in_words() -> None:
    assert in_words(_plan(1610)).startswith(
        "Leave checkpointing off: the plain run fits, with a peak of 1.57 GiB of 1.57"
    )
    plain = TreatmentCost(KEPT, kept_bytes=100 * MIB, working_bytes=20 * MIB)
    kind = BlockKind(4.0, 8.0, (plain, _step().kinds["b"].by_way[WHOLE, frozenset(), 1]))
    words = in_words(solve(StepCosts({"b": kind}, {"s": ("b",) * 2}, 0), 120 * MIB))
    assert words.startswith("Use torch: nothing is quicker within 120 MiB. Peak 120 MiB.")


def test_a_plain_step_is_told_in_one_time() -> None:
    assert "A step takes 72.0 ms.\n" in in_words(_plan(1610))


def test_what_only_moves_is_not_called_kept() -> None:
    plain = TreatmentCost(KEPT, kept_bytes=100 * MIB)
    moving = TreatmentCost(KEPT, frozenset({ATTENTION}), 1, 0, 0, 20 * MIB, 80 * MIB, 80 * MIB, 80 * MIB)
    kind = BlockKind(4000.0, 8000.0, (plain, moving))
    costs = StepCosts({"b": kind}, {"blocks": ("b",) * 6}, 0, link=LinkRates(20, 20))
    words = in_words(solve(costs, 400 * MIB)).splitlines()
    assert any(line.endswith("not recomputed; in CPU memory: what the attention side saves") for line in words)
    assert "A step takes 72.00 s." in words


def test_six_of_the_rejected_are_shown_those_that_fit_first() -> None:
    plan = _plan()
    fits, over = (Alternative(name, peak * MIB, 90.0, 0) for name, peak in (("fits", 1300), ("over", 1400)))
    made = replace(plan, alternatives=(over,) * 7 + (fits,) * 2)
    words = in_words(made).splitlines()
    place = words.index("Compared with, and not taken:")
    names = [line.split(":")[0].strip() for line in words[place + 1 : place + 7]]
    assert names == ["fits"] * 2 + ["over"] * 4
    assert words[place + 7] == "  and 3 more: 3 over the budget"


def test_a_forecast_says_so() -> None:
    assert "forecast from shapes, not measured" in in_words(solve(_step(FORECAST), 1320 * MIB))
    assert "forecast" not in in_words(_plan())


def test_a_plan_as_data() -> None:
    plan = _plan()
    data = json.loads(json.dumps(as_dict(plan)))
    assert data["budget_bytes"] == 1320 * MIB and not data["leave_it_off"] and data["fixed_setting"] is None
    assert data["predicted"]["step_ms"] == plan.prediction.step_ms
    assert data["predicted"]["peak_bytes"] == plan.prediction.peak_bytes <= 1320 * MIB
    assert data["predicted"]["highest"]["block"] == 5
    first, last = data["stacks"]["blocks"]
    assert (first["first"], first["last"], first["moves"]) == (0, 4, [ATTENTION, BOUNDARY])
    assert (last["first"], last["treatment"], last["segment"]) == (5, KEPT, None)
    assert [other["verdict"] for other in data["alternatives"]] == [TOO_MUCH, SLOWER, SLOWER, TOO_MUCH]
    assert as_dict(_plan(1610))["alternatives"][0]["verdict"] == CHOSEN


# ---------------------------------------------------------------------- files


@settings(deadline=None, max_examples=50)
@given(steps(), st.integers(0, 200))
def test_a_plan_comes_back_as_it_was_saved(costs: StepCosts, more_bytes: int) -> None:
    plan = solve(costs, smallest_peak(costs).peak_bytes + more_bytes)
    saved = loads(dumps(plan, {"model": "flux1"}))
    assert saved.plan == plan and saved.schedule == plan.schedule and saved.conditions == {"model": "flux1"}


def test_a_plan_comes_back_from_a_file(tmp_path) -> None:
    save_plan(tmp_path / "plan.json", _plan(), {"resolution": "1024"})
    saved = load_plan(tmp_path / "plan.json")
    assert saved.plan == _plan() and saved.conditions == {"resolution": "1024"}


def test_a_handle_without_a_plan_has_none_to_save(tmp_path) -> None:
    with lowtide.attach(chain(6)) as handle:
        assert handle.settled and handle.plan is None
    with lowtide.attach(chain(6), backend="auto", vram_budget="1GiB") as handle:
        assert not handle.settled
        with pytest.raises(ConfigError, match=r"no plan to be written to .*handle.settled` says when"):
            save_plan(tmp_path / "plan.json", handle.plan)
    assert not (tmp_path / "plan.json").exists()


def test_a_loop_for_auto_runs_with_its_saved_plan(tmp_path) -> None:
    costs = _step()
    plan = solve(StepCosts({"b": costs.kinds["b"]}, {"blocks": ("b",) * 6}, 1000 * MIB), 1300 * MIB)
    save_plan(tmp_path / "plan.json", plan)
    with lowtide.attach(chain(6), schedule=tmp_path / "plan.json") as handle:
        assert handle.settled and handle.plan == plan
    with lowtide.attach(chain(6), schedule=plan.schedule) as handle:
        assert handle.settled and handle.plan is None


def test_where_no_plan_can_be_written_is_told_before_there_is_one(tmp_path) -> None:
    check_place(tmp_path / "plan.json")
    save_plan(tmp_path / "plan.json", _plan())
    check_place(tmp_path / "plan.json")
    with pytest.raises(MachineError, match=r"cannot be written to .*no/plan.json: its folder does not exist"):
        check_place(tmp_path / "no" / "plan.json")
    with pytest.raises(MachineError, match="it is a folder"):
        check_place(tmp_path)


def test_attach_takes_the_schedule_of_a_saved_plan() -> None:
    costs = _step()
    whole = StepCosts({"b": costs.kinds["b"]}, {"blocks": ("b",) * 6}, 1000 * MIB)
    schedule = loads(dumps(solve(whole, 1300 * MIB))).schedule
    model = chain(6)
    with lowtide.attach(model, schedule=schedule) as handle:
        model(inputs()).sum().backward()
        ran = tuple(block.treatment for block in handle.receipt().blocks)
    assert ran == schedule.stacks["blocks"].treatments == (WHOLE,) * 4 + (KEPT,) * 2


def test_attach_moves_what_a_saved_plan_moves() -> None:
    schedule = loads(dumps(solve(_moving_step(), 1320 * MIB))).schedule
    model = chain(6)
    with cpu_offload(), lowtide.attach(model, schedule=schedule, offload_min_bytes=0) as handle:
        model(inputs()).sum().backward()
        receipt = handle.receipt()
    assert [block.treatment for block in receipt.blocks] == ["whole+offload"] * 5 + ["kept"]
    assert receipt.totals["d2h_bytes"] > 0


def test_segments_come_back() -> None:
    plan = solve(_step(), 1400 * MIB)
    blocks = {"blocks": ["whole", "whole", "kept", "kept", "kept", "kept"], "segments": [3, 3, None, None, None, None]}
    data = json.loads(dumps(plan))
    data["plan"]["schedule"]["stacks"]["blocks"] = blocks
    assert loads(json.dumps(data)).schedule.stacks["blocks"].segments == (3, 3, None, None, None, None)


def _changed(change) -> str:
    data = json.loads(dumps(_plan()))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "is a plan of version 2, and this lowtide reads version 1"),
        (lambda d: d.pop("version"), "is a plan of version None"),
        (lambda d: d.update(version=True), "is a plan of version True"),
        (lambda d: d.update(version=1.0), "is a plan of version 1.0"),
        (lambda d: d.update(format="other"), "is not a saved plan: `format` must be 'lowtide plan'"),
        (lambda d: d.pop("plan"), "my.json: plan is missing"),
        (lambda d: d.update(extra=1), "my.json: extra is unknown"),
        (lambda d: d.update(plan=[]), "my.json: plan must be an object, not []"),
        (lambda d: d.update(conditions={"batch": 4}), "conditions.batch must be text, not 4"),
        (lambda d: d["plan"].pop("budget_bytes"), "plan.budget_bytes is missing"),
        (lambda d: d["plan"].update(budget_bytes="8GiB"), "plan.budget_bytes must be a whole number, not '8GiB'"),
        (lambda d: d["plan"].update(budget_bytes=True), "plan.budget_bytes must be a whole number, not True"),
        (lambda d: d["plan"].update(mode=3), "plan.mode must be text or null, not 3"),
        (lambda d: d["plan"]["prediction"].update(extra_ms=None), "plan.prediction.extra_ms must be a number"),
        (lambda d: d["plan"]["prediction"].update(positions=[]), "plan.prediction.positions is empty"),
        (lambda d: d["plan"]["prediction"].pop("positions"), "plan.prediction.positions must be a list"),
        (lambda d: d["plan"]["prediction"]["positions"][1].pop("word"), "positions[1].word is missing"),
        (lambda d: d["plan"]["alternatives"][0].update(x=1), "plan.alternatives[0].x is unknown"),
        (lambda d: _blocks(d).update(blocks=["fnn"] * 6), "is no schedule: 'fnn' does not begin with a treatment"),
        (lambda d: _blocks(d).update(blocks=["kept"]), "is no schedule: treatments, segments and moves"),
        (lambda d: _blocks(d).update(segments=[0] * 6), "is no schedule: a block has a segment number"),
        (lambda d: _blocks(d).update(segments=["0"] * 6), "segments must be a whole number or null, not '0'"),
        (
            lambda d: _blocks(d).update(blocks=["whole"] * 6, segments=[0, 0, 1, 1, 0, 2]),
            "segments is no schedule: block 4 is in segment 0, as block 1 is, and block 3 between them is not",
        ),
        (
            lambda d: _blocks(d).update(blocks=["whole", "kept"] * 3, segments=[0, None, 0, None, 1, None]),
            "block 2 is in segment 0, as block 0 is, and block 1 between them is not",
        ),
        (lambda d: d["plan"]["schedule"].update(stacks={}), "plan.schedule.stacks is empty"),
        (lambda d: d["plan"]["prediction"].update(extra_ms=float("nan")), "NaN is no figure that a plan can have"),
        (lambda d: d["plan"]["schedule"].update(in_flight_bytes=-1), "in_flight_bytes: -1 is not allowed"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(change, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(_changed(change), "my.json")
    assert message in str(error.value)


def _blocks(data: dict) -> dict:
    return data["plan"]["schedule"]["stacks"]["blocks"]


def test_what_is_no_plan_at_all(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"my\.json is no JSON: .* in line 1"):
        loads("{", "my.json")
    with pytest.raises(ConfigError, match="is not a saved plan"):
        loads("[1]")
    with pytest.raises(ConfigError, match=r"no plan can be read from .*none\.json"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(MachineError, match="could not be written"):
        save_plan(tmp_path / "no" / "plan.json", _plan())
