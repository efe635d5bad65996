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
from lowtide.plan.schedule import FFN, KEPT, WHOLE, feed_forwards, keep_all, whole_blocks

FLAT = {
    "gradient_checkpointing": "gradient_checkpointing",
    "backend": "gradient_checkpointing_backend",
    "interval": "gradient_checkpointing_interval",
    "segment_stride": "gradient_checkpointing_segment_stride",
}
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
        keys["backend"] = draw(st.sampled_from(["torch", "torch-ffn", " Torch ", "TORCH-FFN", *UNSET]))
    if on is not False and draw(st.booleans()):
        width = draw(st.integers(1, 50))
        keys["interval"] = draw(st.sampled_from([width, str(width), float(width)]))
        if draw(st.booleans()):
            keys["segment_stride"] = draw(st.integers(width, 60))
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
    assert again.scope == config.scope
    assert again.attach_arguments() == config.attach_arguments()


def test_false_and_null_survive() -> None:
    flat = CheckpointConfig(gradient_checkpointing="off").as_flat_dict()
    assert flat["gradient_checkpointing"] is False
    assert flat["gradient_checkpointing_interval"] is None
    assert CheckpointConfig(**flat).gradient_checkpointing is False


def test_defaults() -> None:
    config = CheckpointConfig()
    assert config.attach_arguments() == {"backend": "torch", "interval": None, "segment_stride": None}
    assert config.scope == WHOLE
    assert CheckpointConfig(backend="torch-ffn").scope == FFN
    assert CheckpointConfig(gradient_checkpointing=False).scope is None


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
        ("False", "To recompute nothing, set gradient_checkpointing to false"),
        ("true", "set gradient_checkpointing to false"),
        (False, "set gradient_checkpointing to false"),
        ("unsloth", "allowed: torch, torch-ffn."),
        ("auto", "allowed: torch, torch-ffn."),
        (3, "allowed: torch, torch-ffn."),
        (["torch"], "allowed: torch, torch-ffn."),
    ],
)
@pytest.mark.parametrize("name", ["backend", "gradient_checkpointing_backend"])
def test_wrong_backends(name: str, value: Any, hint: str) -> None:
    message = message_of(**{name: value})
    assert message.startswith(f"{name}: {value!r} is not allowed; allowed: torch, torch-ffn.")
    assert hint in message


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
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    message = message_of(**{key: 1})
    assert message.startswith(f"unknown key {key!r}. Did you mean {meant!r}? Known keys: gradient_checkpointing, ")


@pytest.mark.parametrize(
    "key",
    ["vram_budget", "on_out_of_memory", *(f"gradient_checkpointing_{end}" for end in ("offload_attention", "budget"))],
)
def test_a_key_that_this_version_does_not_have_is_unknown(key: str) -> None:
    message = message_of(**{key: True})
    assert message.startswith(f"unknown key {key!r}. Known keys: ")
    assert message.count("gradient_checkpointing_offload_attention") <= 1


def test_known_keys_are_listed_in_the_style_of_the_caller() -> None:
    assert message_of(vram_budget=1).endswith("Known keys: gradient_checkpointing, backend, interval, segment_stride.")
    in_a_file = message_of(vram_budget=1, gradient_checkpointing_backend="torch")
    assert in_a_file.endswith(f"Known keys: {', '.join(FLAT.values())}.")


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


class TestSchedule:
    def test_whole_blocks_by_stack(self) -> None:
        schedule = CheckpointConfig(interval=2, segment_stride=4).schedule_for(DEPTHS, EVERY_STACK)
        assert schedule.stacks == {"double": whole_blocks(6, 2, 4), "single": whole_blocks(8, 2, 4)}

    def test_nothing_recomputed(self) -> None:
        schedule = CheckpointConfig(gradient_checkpointing=False).schedule_for(DEPTHS, EVERY_STACK)
        assert schedule.stacks == {"double": keep_all(6), "single": keep_all(8)}

    def test_a_stack_without_feed_forward_is_kept(self) -> None:
        config = CheckpointConfig(backend="torch-ffn", interval=3)
        schedule = config.schedule_for(DEPTHS, {"double": True, "single": False})
        assert schedule.stacks == {"double": feed_forwards(6, 3), "single": keep_all(8)}

    def test_no_stack_with_a_feed_forward_is_an_error_that_names_model_and_backends(self) -> None:
        config = CheckpointConfig(backend="torch-ffn")
        with pytest.raises(UnsupportedError) as caught:
            config.schedule_for(DEPTHS, dict.fromkeys(DEPTHS, False), model="ConvNet")
        assert "ConvNet" in str(caught.value)
        assert str(caught.value).endswith("Backends that it can run: torch.")

    @pytest.mark.parametrize(
        ("keys", "effect", "treated"),
        [
            ({"interval": 9}, "each stack is one segment", {"double": 6, "single": 8}),
            ({"interval": 9, "segment_stride": 20}, "each stack is one segment", {"double": 6, "single": 8}),
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
            schedule = CheckpointConfig(**keys).schedule_for(DEPTHS, EVERY_STACK)
        assert len(seen) == 1
        assert {name: stack.depth - stack.count(KEPT) for name, stack in schedule.stacks.items()} == treated

    def test_an_interval_as_wide_as_the_deepest_stack_does_not_warn(self) -> None:
        schedule = CheckpointConfig(interval=8).schedule_for(DEPTHS, EVERY_STACK)
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
    with pytest.raises(ConfigError, match="allowed: true, false, torch, torch-ffn"):
        parse_switch(value)


def test_scopes_of() -> None:
    assert scopes_of([False, True]) == ["torch", "torch-ffn"]
    assert scopes_of([False]) == ["torch"]
