"""The controls: every message, both doors, and the schedule that they ask for."""

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.controls import BACKENDS, CheckpointConfig, parse_switch, scopes_of
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.plan.costs import BlockKind, StepCosts, TreatmentCost
from lowtide.plan.saved_plan import save_plan
from lowtide.plan.schedule import (
    ATTENTION,
    BOUNDARY,
    FFN,
    KEPT,
    MOVES,
    SELECTIVE,
    WHOLE,
    StackSchedule,
    feed_forwards,
    keep_all,
    whole_blocks,
)
from lowtide.plan.solve import solve

FLAT = {
    "gradient_checkpointing": "gradient_checkpointing",
    "backend": "gradient_checkpointing_backend",
    "vram_budget": "vram_budget",
    "schedule": "gradient_checkpointing_schedule",
    "interval": "gradient_checkpointing_interval",
    "segment_stride": "gradient_checkpointing_segment_stride",
    "offload_attention": "gradient_checkpointing_offload_attention",
    "offload_pin_memory_max_buckets": "gradient_checkpointing_offload_pin_memory_max_buckets",
    "offload_min_bytes": "gradient_checkpointing_offload_min_bytes",
}
ALLOWED_BACKENDS = "torch, torch-ffn, unsloth, unsloth-ffn, torch-selective, unsloth-selective, auto"
UNSET = [None, "none", "None", "null", " NULL ", ""]


def message_of(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**keys)
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


@st.composite
def valid_keys(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a valid configuration by argument name, in the spellings that people use; any may be left out."""
    keys: dict[str, Any] = {}
    on = draw(st.sampled_from([True, False, None]))
    if on is not None:
        spellings = ["true", "Yes", "ON", "1", True] if on else ["False", "no", " off ", "0", False]
        keys["gradient_checkpointing"] = draw(st.sampled_from(spellings))
    if draw(st.booleans()):
        keys["backend"] = draw(st.sampled_from([*BACKENDS, " Torch ", "UNSLOTH-Selective", *UNSET]))
    if on is not False and draw(st.booleans()):
        width = draw(st.integers(1, 50))
        keys["interval"] = draw(st.sampled_from([width, str(width), float(width)]))
        if draw(st.booleans()):
            keys["segment_stride"] = draw(st.integers(width, 60))
    if draw(st.booleans()):
        keys["offload_attention"] = draw(st.sampled_from([True, "on", 1, False, "No", "none"]))
    if draw(st.booleans()):
        keys["offload_pin_memory_max_buckets"] = draw(st.sampled_from([0, "3", 12, None]))
    if draw(st.booleans()):
        keys["offload_min_bytes"] = draw(st.sampled_from([0, 2**40, "4096", "1.5 KiB", " 2mb ", ""]))
    return keys


@given(valid_keys())
def test_both_doors_give_equal_objects(keys: dict[str, Any]) -> None:
    by_argument = CheckpointConfig(**keys)
    by_flat_key = CheckpointConfig(**{FLAT[name]: value for name, value in keys.items()})
    assert by_argument == by_flat_key
    assert hash(by_argument) == hash(by_flat_key)


@given(valid_keys())
def test_configuration_to_file_to_configuration_is_the_identity(keys: dict[str, Any]) -> None:
    config = CheckpointConfig(**keys)
    flat = config.as_flat_dict()
    assert list(flat) == list(FLAT.values())
    again = CheckpointConfig(**json.loads(json.dumps(flat)))
    assert again == config
    assert again.as_flat_dict() == flat


@given(valid_keys())
def test_attach_arguments_mean_the_same(keys: dict[str, Any]) -> None:
    config = CheckpointConfig(**keys)
    again = CheckpointConfig.for_attach(**config.attach_arguments())
    assert (again.scope, again.moves) == (config.scope, config.moves)
    assert again.attach_arguments() == config.attach_arguments()


def test_false_and_null_survive() -> None:
    flat = CheckpointConfig(gradient_checkpointing="off").as_flat_dict()
    assert flat["gradient_checkpointing"] is False
    assert flat["gradient_checkpointing_interval"] is None
    assert CheckpointConfig(**flat).gradient_checkpointing is False


def test_defaults() -> None:
    config = CheckpointConfig()
    assert config.attach_arguments() == {
        "backend": "torch",
        "vram_budget": None,
        "schedule": None,
        "interval": None,
        "segment_stride": None,
        "offload_attention": False,
        "offload_pin_memory_max_buckets": 12,
        "offload_min_bytes": 2**20,
    }
    assert (config.scope, config.moves) == (WHOLE, False)
    assert CheckpointConfig(gradient_checkpointing=False).scope is None


@pytest.mark.parametrize(
    ("backend", "scope", "moves"),
    [
        ("torch", WHOLE, False),
        ("torch-ffn", FFN, False),
        ("unsloth", WHOLE, True),
        ("unsloth-ffn", FFN, True),
        ("torch-selective", SELECTIVE, False),
        ("unsloth-selective", SELECTIVE, True),
    ],
)
def test_what_a_backend_treats_and_whether_it_needs_an_accelerator(backend: str, scope: str, moves: bool) -> None:
    config = CheckpointConfig(backend=backend)
    assert (config.scope, config.moves) == (scope, moves)
    assert CheckpointConfig(backend=backend, offload_attention=True).moves
    assert not CheckpointConfig(gradient_checkpointing=False, backend=backend).moves


@pytest.mark.parametrize(
    ("given", "means"),
    [("16GiB", 16 * 2**30), ("12 GB", 12 * 10**9), (" Auto ", "auto"), (2**30, 2**30), (None, None), ("none", None)],
)
def test_budgets(given: Any, means: Any) -> None:
    config = CheckpointConfig(backend="auto", vram_budget=given)
    assert config.vram_budget == means
    assert CheckpointConfig(**config.as_flat_dict()) == config
    assert (config.is_auto, config.scope, config.moves, config.backend_moves) == (True, None, False, frozenset())
    assert not CheckpointConfig(gradient_checkpointing=False, backend="auto").is_auto


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"vram_budget": 16},
            "vram_budget: 16 is 16 bytes, below 1MiB; allowed: a size such as 16GiB, or auto. Did you mean 16GiB?",
        ),
        ({"vram_budget": "aut"}, "a size such as 16GiB, or auto. Did you mean 'auto'?"),
        ({"vram_budget": "16gig"}, "a size such as 16GiB, or auto. Did you mean '16GiB'?"),
        (
            {"vram_budget": "16 kb", "backend": "auto"},
            "'16 kb' is 16000 bytes, below 1MiB; allowed: a size such as 16GiB, or auto.",
        ),
        ({"vram_budget": "lots"}, "vram_budget: 'lots' is not allowed; allowed: a size such as 16GiB, or auto."),
        ({"vram_budget": -1}, "vram_budget: -1 is not allowed; allowed: a size such as 16GiB, or auto."),
        (
            {"vram_budget": "16GiB", "backend": "torch"},
            "vram_budget bounds what backend = auto chooses, and nothing else",
        ),
        (
            {"vram_budget": "16GiB", "gradient_checkpointing": False},
            "vram_budget bounds what backend = auto chooses",
        ),
        ({"interval": 2}, "backend = auto chooses for each block by itself: leave interval out (null in a file"),
        ({"interval": 2, "segment_stride": 3}, "leave interval and segment_stride out (null in a file"),
        ({"offload_attention": True}, "leave offload_attention out (null in a file"),
    ],
    ids=str,
)
def test_wrong_budgets(keys: dict[str, Any], message: str) -> None:
    assert message in message_of(**{"backend": "auto", **keys})


def test_auto_has_no_schedule_before_its_first_steps() -> None:
    with pytest.raises(ConfigError, match="`lowtide plan` shows what it would choose"):
        CheckpointConfig(backend="auto").schedule_for({"blocks": 4}, {"blocks": True}, {"blocks": True})


def test_attention_offload_alone() -> None:
    config = CheckpointConfig(gradient_checkpointing=False, offload_attention=True)
    assert (config.scope, config.moves) == (None, True)
    assert config == CheckpointConfig.for_attach(None, offload_attention="yes")


@pytest.mark.parametrize("unset", UNSET)
def test_none_null_and_the_empty_word_mean_unset(unset: str | None) -> None:
    assert CheckpointConfig(**dict.fromkeys(FLAT, unset)) == CheckpointConfig()
    assert CheckpointConfig.for_attach(unset) == CheckpointConfig(gradient_checkpointing=False)


@pytest.mark.parametrize("value", [2, "2", " 2 ", "+2", 2.0])
def test_whole_numbers_in_their_spellings(value: Any) -> None:
    interval = CheckpointConfig(interval=value).interval
    assert interval == 2
    assert type(interval) is int


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-1", 1.5, "1.5", 2.5, math.nan, math.inf, True, False, "two", "1e2", "2.0", [2], {"n": 2}]
)
@pytest.mark.parametrize("name", ["interval", "gradient_checkpointing_interval"])
def test_wrong_intervals(name: str, value: Any) -> None:
    message = message_of(**{name: value})
    assert message == f"{name}: {value!r} is not allowed; allowed: a whole number, 1 or more."


@pytest.mark.parametrize("value", [0, -4, 2.5, True, "many"])
def test_wrong_strides(value: Any) -> None:
    message = message_of(interval=1, segment_stride=value)
    assert message == f"segment_stride: {value!r} is not allowed; allowed: a whole number, 1 or more."


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("torhc", "Did you mean 'torch'?"),
        ("torch_ffn", "Did you mean 'torch-ffn'?"),
        ("unslot", "Did you mean 'unsloth'?"),
        ("unsloth_ffn", "Did you mean 'unsloth-ffn'?"),
        ("unsloth selective", "Did you mean 'unsloth-selective'?"),
        ("False", "To recompute nothing, set gradient_checkpointing to false"),
        ("true", "set gradient_checkpointing to false"),
        (False, "set gradient_checkpointing to false"),
        ("fastest", ""),
        (3, ""),
        (["torch"], ""),
    ],
)
@pytest.mark.parametrize("name", ["backend", "gradient_checkpointing_backend"])
def test_wrong_backends(name: str, value: Any, hint: str) -> None:
    message = message_of(**{name: value})
    assert message.startswith(f"{name}: {value!r} is not allowed; allowed: {ALLOWED_BACKENDS}.")
    assert hint in message
    assert bool(hint) == (not message.endswith(f"{ALLOWED_BACKENDS}."))


@pytest.mark.parametrize("value", [-1, "-1", 1.5, True, False, "twelve", "1.0", [12], math.inf])
@pytest.mark.parametrize("name", ["offload_pin_memory_max_buckets", FLAT["offload_pin_memory_max_buckets"]])
def test_wrong_numbers_of_buckets(name: str, value: Any) -> None:
    assert message_of(**{name: value}) == f"{name}: {value!r} is not allowed; allowed: a whole number, 0 or more."


@pytest.mark.parametrize("value", [0, 1, "0", 12])
def test_numbers_of_buckets(value: Any) -> None:
    assert CheckpointConfig(offload_pin_memory_max_buckets=value).offload_pin_memory_max_buckets == int(value)


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [(0, 0), ("0", 0), (4096.0, 4096), ("4096", 4096), ("1MiB", 2**20), (" 1.5 kb ", 1500), ("2 gib", 2**31)],
)
def test_smallest_sizes(value: Any, size_bytes: int) -> None:
    found = CheckpointConfig(offload_min_bytes=value).offload_min_bytes
    assert (found, type(found)) == (size_bytes, int)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (-1, ""),
        ("-1 MiB", ""),
        (1.5, ""),
        (True, ""),
        ("big", ""),
        ([1], ""),
        (math.nan, ""),
        ("1 MiBi", " Did you mean 'MiB'?"),
        ("3gbb", " Did you mean 'GB'?"),
    ],
)
@pytest.mark.parametrize("name", ["offload_min_bytes", FLAT["offload_min_bytes"]])
def test_wrong_smallest_sizes(name: str, value: Any, hint: str) -> None:
    allowed = "a size, 0 bytes or more: a whole number of bytes, or one with a unit as in 512KiB or '1.5 MB'"
    assert message_of(**{name: value}) == f"{name}: {value!r} is not allowed; allowed: {allowed}.{hint}"


@pytest.mark.parametrize("value", [2, -1, "attention", 0.0, []])
def test_wrong_switches_of_attention_offload(value: Any) -> None:
    message = message_of(offload_attention=value)
    assert message.startswith(f"offload_attention: {value!r} is not allowed; allowed: true or false")


def test_a_long_value_is_cut() -> None:
    assert len(message_of(backend="x" * 10_000)) < 300


@pytest.mark.parametrize("value", [2, -1, "maybe", 0.0, "torch", [], "t"])
def test_wrong_switches(value: Any) -> None:
    message = message_of(gradient_checkpointing=value)
    assert message.startswith(f"gradient_checkpointing: {value!r} is not allowed; allowed: true or false")


def test_a_misspelt_switch_names_its_neighbour() -> None:
    assert message_of(gradient_checkpointing="ture").endswith("Did you mean 'true'?")
    assert message_of(gradient_checkpointing="flase").endswith("Did you mean 'false'?")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("intervall", "interval"),
        ("segmentstride", "segment_stride"),
        ("stride", "segment_stride"),
        ("Backend", "backend"),
        ("gradient_checkpointing_intervall", "gradient_checkpointing_interval"),
        ("gradient_checkpointing_stride", "gradient_checkpointing_segment_stride"),
        ("gradient_checkpoint", "gradient_checkpointing"),
        ("gradient_checkpoint_interval", "gradient_checkpointing_interval"),
        ("gradient-checkpointing", "gradient_checkpointing"),
        ("offload_attn", "offload_attention"),
        ("gradient_checkpointing_offload_attentions", "gradient_checkpointing_offload_attention"),
        ("gradient_checkpointing_pin_memory_max_buckets", FLAT["offload_pin_memory_max_buckets"]),
        ("offload_minimum_bytes", "offload_min_bytes"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    message = message_of(**{key: 1})
    assert message.startswith(f"unknown key {key!r}. Did you mean {meant!r}? Known keys: gradient_checkpointing, ")


@pytest.mark.parametrize("key", ["budget_of_vram", "on_out_of_memory", "gradient_checkpointing_budget"])
def test_a_key_that_this_version_does_not_have_is_unknown(key: str) -> None:
    message = message_of(**{key: True})
    assert message.startswith(f"unknown key {key!r}. Known keys: ")


def test_known_keys_are_listed_in_the_style_of_the_caller() -> None:
    assert message_of(resolution=1).endswith(f"Known keys: {', '.join(FLAT)}.")
    in_a_file = message_of(resolution=1, gradient_checkpointing_backend="torch")
    assert in_a_file.endswith(f"Known keys: {', '.join(FLAT.values())}.")


@pytest.mark.parametrize(
    "beside",
    [{"backend": "unsloth"}, {"interval": 2}, {"offload_attention": True}, {"gradient_checkpointing": False},
     {"backend": "auto", "vram_budget": "8GiB"}],
)  # fmt: skip
def test_a_schedule_leaves_nothing_to_say(beside: dict[str, Any]) -> None:
    message = message_of(schedule="plan.json", **beside)
    expected = f"schedule says by itself what is done with every block: leave {' and '.join(beside)} out"
    assert message == f"{expected} (null in a file, none on a command line)."
    flat = {FLAT[name]: value for name, value in beside.items()}
    assert "gradient_checkpointing_schedule says by itself" in message_of(
        gradient_checkpointing_schedule="plan.json", **flat
    )


def test_the_schedule_of_a_file(tmp_path: Path) -> None:
    costs = StepCosts(
        {"a": BlockKind(1.0, 2.0, (TreatmentCost(KEPT), TreatmentCost(WHOLE)))}, {"blocks": ("a",) * 3}, 0
    )
    plan = solve(costs, 2**30)
    save_plan(tmp_path / "plan.json", plan)
    config = CheckpointConfig(schedule=str(tmp_path / "plan.json"), offload_min_bytes=7)
    assert config.schedule_for({"blocks": 3}, {"blocks": True}, {"blocks": True}) == plan.schedule == config.planned()
    assert (config.scope, config.moves, config.is_auto) == (None, False, False)
    again = CheckpointConfig.for_attach(**config.attach_arguments())
    assert again == config == CheckpointConfig(**config.as_flat_dict())
    with pytest.raises(ConfigError, match="no plan can be read from"):
        CheckpointConfig(schedule=str(tmp_path / "none.json")).planned()


def test_one_key_under_both_names() -> None:
    message = message_of(interval=2, gradient_checkpointing_interval=2)
    assert "'interval' and 'gradient_checkpointing_interval' are two names of one key" in message


def test_several_mistakes_are_all_named() -> None:
    lines = message_of(backend="x", gradient_checkpointing_interval=0).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["backend", "gradient_checkpointing_interval"]


@pytest.mark.parametrize("flat", [False, True])
def test_keys_that_contradict_each_other(flat: bool) -> None:
    def message(**keys: Any) -> str:
        return message_of(**{FLAT[name] if flat else name: value for name, value in keys.items()})

    interval, stride = (FLAT[name] if flat else name for name in ("interval", "segment_stride"))
    assert message(interval=3, segment_stride=2) == (
        f"{stride} = 2 is smaller than {interval} = 3, so segments would overlap; allowed: 3 or more."
    )
    assert message(segment_stride=4).startswith(f"{stride} = 4 needs {interval}, the width of a segment")
    assert message(gradient_checkpointing=False, interval=2).startswith(f"{interval} = 2 needs a backend")
    assert message(gradient_checkpointing="no", segment_stride=2).startswith(f"{stride} = 2 needs a backend")
    alone = message(gradient_checkpointing=False, offload_attention=True, interval=2)
    assert alone.startswith(f"{interval} = 2 needs a backend")
    assert ALLOWED_BACKENDS.removesuffix(", auto") in alone


def test_no_backend_for_attach_takes_no_interval() -> None:
    with pytest.raises(ConfigError, match="interval = 2 needs a backend"):
        CheckpointConfig.for_attach(None, interval=2)


def test_frozen_copied_and_pickled() -> None:
    config = CheckpointConfig(interval=2)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.interval = 3  # type: ignore[misc]


class TestFile:
    def read(self, tmp_path: Path, text: str) -> CheckpointConfig:
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        return CheckpointConfig.from_json_file(path)

    def test_equals_keyword_arguments(self, tmp_path: Path) -> None:
        text = '{"gradient_checkpointing_backend": "torch-ffn", "gradient_checkpointing_interval": "2"}'
        assert self.read(tmp_path, text) == CheckpointConfig(backend="torch-ffn", interval=2)

    def test_round_trip(self, tmp_path: Path) -> None:
        config = CheckpointConfig(gradient_checkpointing=False)
        assert self.read(tmp_path, json.dumps(config.as_flat_dict())) == config

    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("{", "is not JSON: "),
            ("", "is not JSON: "),
            ('{"gradient_checkpointing_interval": ' + "1" * 5000 + "}", "cannot be read as JSON: "),
            ("[" * 100_000, "cannot be read as JSON: "),
            ("[1]", "must hold one JSON object"),
            ("null", "must hold one JSON object"),
            ('{"gradient_checkpointing": true, "gradient_checkpointing": false}', "has a key twice"),
            ('{"gradient_checkpointing_interval": NaN}', "gradient_checkpointing_interval: nan is not allowed"),
            ('{"gradient_checkpointing_intervall": 2}', "unknown key"),
        ],
    )
    def test_mistakes_name_the_file(self, tmp_path: Path, text: str, what: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.read(tmp_path, text)
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {what}")

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="there is no such file"):
            CheckpointConfig.from_json_file(tmp_path / "missing.json")
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            CheckpointConfig.from_json_file(tmp_path)
        binary = tmp_path / "binary.json"
        binary.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="is not UTF-8 text"):
            CheckpointConfig.from_json_file(binary)


DEPTHS = {"double": 6, "single": 8}
EVERY_STACK = {"double": True, "single": True}
NO_STACK = {"double": False, "single": False}


def words_of(stack: StackSchedule) -> list[str]:
    """``whole+boundary`` for each block."""
    return [
        "+".join([treatment, *sorted(moves)]) for treatment, moves in zip(stack.treatments, stack.moves, strict=True)
    ]


@given(valid_keys(), st.integers(1, 12), st.booleans())
@pytest.mark.filterwarnings("ignore:interval .* is wider")
def test_what_moves_is_what_the_treatment_holds_and_the_keys_ask_for(
    keys: dict[str, Any], depth: int, any_feed_forward: bool
) -> None:
    """Against the rules of each key, not the code: gaps stay, a whole block's attention never moves."""
    config = CheckpointConfig(**keys)
    sides = {"blocks": True, "more": any_feed_forward}
    schedule = config.schedule_for({"blocks": depth, "more": depth}, sides, {"blocks": True, "more": True})
    plain = CheckpointConfig(**{**keys, "backend": (config.backend).replace("unsloth", "torch")})
    unmoved = plain.schedule_for({"blocks": depth, "more": depth}, sides, {"blocks": True, "more": True})
    on, offloading = config.gradient_checkpointing, config.backend.startswith("unsloth")
    for name, stack in schedule.stacks.items():
        assert (stack.treatments, stack.segments) == (unmoved.stacks[name].treatments, unmoved.stacks[name].segments)
        for treatment, moves in zip(stack.treatments, stack.moves, strict=True):
            assert moves <= MOVES[treatment]
            assert (BOUNDARY in moves) == (on and offloading and treatment != KEPT)
            selective_moves = treatment == SELECTIVE and offloading
            assert (ATTENTION in moves) == (treatment != WHOLE and (config.offload_attention or selective_moves))
    assert config.moves or not schedule.moves_anything


class TestSchedule:
    def test_whole_blocks_by_stack(self) -> None:
        schedule = CheckpointConfig(interval=2, segment_stride=4).schedule_for(DEPTHS, EVERY_STACK, EVERY_STACK)
        assert schedule.stacks == {"double": whole_blocks(6, 2, 4), "single": whole_blocks(8, 2, 4)}

    def test_nothing_recomputed(self) -> None:
        schedule = CheckpointConfig(gradient_checkpointing=False).schedule_for(DEPTHS, EVERY_STACK, EVERY_STACK)
        assert schedule.stacks == {"double": keep_all(6), "single": keep_all(8)}

    def test_a_stack_without_feed_forward_is_kept(self) -> None:
        config = CheckpointConfig(backend="torch-ffn", interval=3)
        schedule = config.schedule_for(DEPTHS, {"double": True, "single": False}, EVERY_STACK)
        assert schedule.stacks == {"double": feed_forwards(6, 3), "single": keep_all(8)}

    @pytest.mark.parametrize("backend", ["torch-ffn", "unsloth-ffn"])
    def test_no_stack_with_a_feed_forward_is_an_error_that_names_model_and_backends(self, backend: str) -> None:
        config = CheckpointConfig(backend=backend)
        with pytest.raises(UnsupportedError) as caught:
            config.schedule_for(DEPTHS, NO_STACK, NO_STACK, model="ConvNet")
        assert str(caught.value).startswith(
            f"backend {backend!r} recomputes feed-forward sides, and no block of ConvNet"
        )
        assert str(caught.value).endswith("Backends that it can run: torch, unsloth.")

    @pytest.mark.parametrize(
        ("keys", "named"),
        [
            ({"backend": "torch-selective"}, "backend 'torch-selective' keeps the outputs of softmax attention"),
            ({"backend": "unsloth-selective", "interval": 2}, "backend 'unsloth-selective' keeps the outputs"),
            ({"offload_attention": True}, "offload_attention moves what softmax attention saves"),
            ({"backend": "unsloth-ffn", "offload_attention": True}, "offload_attention moves"),
            ({"gradient_checkpointing": False, "offload_attention": True}, "offload_attention moves"),
        ],
    )
    def test_no_softmax_attention_is_an_error_that_names_model_and_backends(
        self, keys: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedError) as caught:
            CheckpointConfig(**keys).schedule_for(DEPTHS, EVERY_STACK, NO_STACK, model="LinearNet")
        assert str(caught.value).startswith(named)
        assert "no block of LinearNet has an attention module" in str(caught.value)
        assert "call the attention kernel by themselves are for backend auto" in str(caught.value)
        assert str(caught.value).endswith("Backends that it can run: torch, torch-ffn, unsloth, unsloth-ffn.")

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"backend": "unsloth"}, ["whole+boundary"] * 6),
            ({"backend": "unsloth", "interval": 1, "segment_stride": 2}, ["whole+boundary", "kept"] * 3),
            ({"backend": "unsloth-ffn", "interval": 3}, ["ffn+boundary", "kept", "kept"] * 2),
            ({"backend": "torch-selective"}, ["selective"] * 6),
            (
                {"backend": "unsloth-selective", "interval": 1, "segment_stride": 3},
                ["selective+attention+boundary", "kept", "kept"] * 2,
            ),
            ({"offload_attention": True}, ["whole"] * 6),
            ({"offload_attention": True, "interval": 1, "segment_stride": 2}, ["whole", "kept+attention"] * 3),
            (
                {"backend": "unsloth", "offload_attention": True, "interval": 1, "segment_stride": 2},
                ["whole+boundary", "kept+attention"] * 3,
            ),
            ({"backend": "torch-ffn", "offload_attention": True}, ["ffn+attention"] * 6),
            (
                {"backend": "unsloth-ffn", "offload_attention": True, "interval": 2},
                ["ffn+attention+boundary", "kept+attention"] * 3,
            ),
            ({"backend": "torch-selective", "offload_attention": True}, ["selective+attention"] * 6),
            ({"gradient_checkpointing": False, "offload_attention": True}, ["kept+attention"] * 6),
        ],
        ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
    )
    def test_what_waits_in_cpu_memory(self, keys: dict[str, Any], words: list[str]) -> None:
        schedule = CheckpointConfig(**keys).schedule_for(DEPTHS, EVERY_STACK, EVERY_STACK)
        assert words_of(schedule.stacks["double"]) == words

    def test_segments_of_selective_blocks(self) -> None:
        schedule = CheckpointConfig(backend="torch-selective", interval=2, segment_stride=3).schedule_for(
            DEPTHS, EVERY_STACK, EVERY_STACK
        )
        assert schedule.stacks["double"] == whole_blocks(6, 2, 3, SELECTIVE)
        assert schedule.stacks["double"].segments == (0, 0, None, 1, 1, None)

    def test_a_stack_without_softmax_attention_moves_none(self) -> None:
        only_single = {"double": False, "single": True}
        schedule = CheckpointConfig(backend="unsloth-selective").schedule_for(DEPTHS, EVERY_STACK, only_single)
        assert set(words_of(schedule.stacks["double"])) == {"selective+boundary"}
        assert set(words_of(schedule.stacks["single"])) == {"selective+attention+boundary"}
        alone = CheckpointConfig(gradient_checkpointing=False, offload_attention=True)
        schedule = alone.schedule_for(DEPTHS, EVERY_STACK, only_single)
        assert schedule.stacks["double"] == keep_all(6)
        assert set(words_of(schedule.stacks["single"])) == {"kept+attention"}

    def test_a_stack_without_feed_forward_can_still_move_its_attention(self) -> None:
        config = CheckpointConfig(backend="unsloth-ffn", offload_attention=True)
        schedule = config.schedule_for(DEPTHS, {"double": True, "single": False}, EVERY_STACK)
        assert set(words_of(schedule.stacks["double"])) == {"ffn+attention+boundary"}
        assert set(words_of(schedule.stacks["single"])) == {"kept+attention"}

    @pytest.mark.parametrize(
        ("keys", "effect", "treated"),
        [
            ({"interval": 9}, "each stack is one segment", {"double": 6, "single": 8}),
            ({"interval": 9, "segment_stride": 20}, "each stack is one segment", {"double": 6, "single": 8}),
            ({"interval": 9, "backend": "unsloth-selective"}, "each stack is one segment", {"double": 6, "single": 8}),
            ({"interval": 9, "backend": "unsloth-ffn"}, "only the first block", {"double": 1, "single": 1}),
            ({"interval": 9, "backend": "torch-ffn"}, "only the first block", {"double": 1, "single": 1}),
            (
                {"interval": 9, "segment_stride": 9, "backend": "torch-ffn"},
                "every block is treated",
                {"double": 6, "single": 8},
            ),
        ],
    )
    def test_an_interval_wider_than_every_stack_warns_once(
        self, keys: dict[str, Any], effect: str, treated: dict[str, int]
    ) -> None:
        with pytest.warns(
            UserWarning, match=f"interval 9 is wider than the deepest block stack.*8 blocks.*{effect}"
        ) as seen:
            schedule = CheckpointConfig(**keys).schedule_for(DEPTHS, EVERY_STACK, EVERY_STACK)
        assert len(seen) == 1
        assert {name: stack.depth - stack.count(KEPT) for name, stack in schedule.stacks.items()} == treated

    def test_an_interval_as_wide_as_the_deepest_stack_does_not_warn(self) -> None:
        schedule = CheckpointConfig(interval=8).schedule_for(DEPTHS, EVERY_STACK, EVERY_STACK)
        assert schedule.stacks["double"].segments == (0,) * 6  # a warning would be an error here


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        *((word, True) for word in (True, 1, "true", "True", "YES", " on ", "1")),
        *((word, False) for word in (False, 0, "false", "FALSE", "no", "Off", "0")),
        *((word, None) for word in UNSET),
        *((f" {backend.upper()} ", backend) for backend in BACKENDS),
    ],
)
def test_parse_switch(value: Any, meaning: bool | str | None) -> None:
    assert parse_switch(value) is meaning or parse_switch(value) == meaning
    assert type(parse_switch(value)) is type(meaning)


@pytest.mark.parametrize("value", [2, -1, 1.0, "unslot", "torch ffn", [], object])
def test_parse_switch_refuses_the_rest(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"allowed: true, false, {ALLOWED_BACKENDS}"):
        parse_switch(value)


def test_scopes_of() -> None:
    assert scopes_of([False, True], [True, False]) == list(BACKENDS)
    assert scopes_of([False], [True]) == ["torch", "unsloth", "torch-selective", "unsloth-selective"]
    assert scopes_of([True], [False]) == ["torch", "torch-ffn", "unsloth", "unsloth-ffn"]
    assert scopes_of([False], [False]) == ["torch", "unsloth"]


@pytest.mark.parametrize("word", ["none", " Null", ""])
def test_a_backend_that_is_a_word_for_unset_is_told(word: str, caplog: pytest.LogCaptureFixture) -> None:
    assert CheckpointConfig(gradient_checkpointing_backend=word).backend == "torch"
    (record,) = caplog.records
    assert f"backend {word!r} counts as not set, so it is torch" in record.getMessage()
    caplog.clear()
    assert not CheckpointConfig(gradient_checkpointing=False, backend=word).gradient_checkpointing
    assert CheckpointConfig(schedule="plan.json", backend=word).schedule and CheckpointConfig(backend=None)
    assert not caplog.records
