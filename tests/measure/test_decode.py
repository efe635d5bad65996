"""The input language: expressions, nodes, and what is refused."""

import pytest
import torch

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families import Build
from lowtide.families.inputs import (
    count,
    fixed,
    full,
    grid,
    joined,
    mask,
    numbered,
    ones,
    per_row,
    rand,
    randint,
    randn,
    read,
    several,
    size,
    when,
    zeros,
)
from lowtide.measure.inputs import build_inputs, evaluate, namespace
from lowtide.runtime.flatten import tensors_of


def _build(**inputs) -> Build:
    return Build(config={}, vars={"B": 2, "T": 5, "G": 0}, let={"S": "T*B", "U": "S-1"}, inputs=inputs)


@pytest.mark.parametrize(
    ("expression", "value"),
    [(7, 7), ("T", 5), ("(T-1)//2+1", 3), ("-T", -5), ("max(T, 9) % 4", 1), ("min(T,2)*3", 6)],
)
def test_expressions(expression, value):
    assert evaluate(expression, {"T": 5}) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "T.real", "T**9", "[T]", "lambda: 1", "T if T else 1", "unknown", "1/2", "T(", "T//0", "'a'"],
)
def test_anything_but_arithmetic_over_known_names_is_refused(expression):
    with pytest.raises(ConfigError, match="cannot evaluate the size"):
        evaluate(expression, {"T": 5})


def test_names_follow_overrides():
    assert namespace(_build()) == {"B": 2, "T": 5, "G": 0, "S": 10, "U": 9}
    assert namespace(_build(), {"T": 6})["U"] == 11


def test_an_override_that_the_family_does_not_have_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"unknown size FR \(frames\); this family has: B \(batch\), T \(text tokens\), G"
    ):
        namespace(_build(), {"FR": 9})


def test_every_node():
    made = build_inputs(
        _build(
            a=randn("B", 3),
            b=rand("T", scale=1000.0),
            c=randint("B", high=4),
            d=zeros("T", 3),
            e=full(3.5, "B"),
            f=ones("B", "T", dtype="bool"),
            g=mask("B", "T", lengths=("T", "T-2")),
            h=grid(1, 2, 3),
            i=several("B", fixed(1, size("S"))),
            j=numbered({4: randn(1)}),
            k=when("G", randn(1)),
            m={"deep": [None, size("U")]},
        ),
        torch.bfloat16,
    )
    assert made["a"].shape == (2, 3) and made["a"].dtype is torch.bfloat16
    assert made["b"].shape == (5,) and float(made["b"].max()) > 1.0
    assert made["c"].dtype is torch.int64 and int(made["c"].max()) < 4
    assert made["d"].dtype is torch.float32 and not made["d"].any()
    assert made["e"].tolist() == [3.5, 3.5]
    assert made["f"].dtype is torch.bool and bool(made["f"].all())
    assert made["g"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert made["h"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert made["i"] == [(1, 10), (1, 10)]
    assert list(made["j"]) == [4]
    assert made["k"] is None
    assert made["m"] == {"deep": [None, 9]}


def test_positions_lengths_and_joined_tensors():
    made = build_inputs(
        _build(
            a=grid(1, "B", scale=(1.0, 0.5), offset=(0.0, 7.0)),
            b=grid("B", 1, dtype="int64", offset=(9, 0), batch="B"),
            c=count("B", "T-2", start=4),
            d=per_row("T", "T-2"),
            e=joined(zeros("B", 1, dtype="bool"), ones("B", 2, dtype="bool"), dim=1),
        )
    )
    assert made["a"].tolist() == [[0.0, 7.0], [0.0, 7.5]]
    assert made["b"].tolist() == [[[9, 0], [10, 0]]] * 2 and made["b"].dtype is torch.int64
    assert made["c"].tolist() == [[4, 5, 6]] * 2
    assert made["d"].tolist() == [5, 3]
    assert made["e"].tolist() == [[False, True, True]] * 2


def test_without_memory_what_the_forward_reads_has_values_all_the_same():
    build = _build(a=randn("B", 3), b=read(randn("B", 3)), c=mask("B", "T", lengths=("T", "T-2")))
    made = build_inputs(build, torch.bfloat16, device="meta")
    assert made["a"].is_meta and made["a"].dtype is torch.bfloat16
    assert made["b"].device.type == "cpu" and made["b"].dtype is torch.bfloat16 and bool(made["b"].any())
    assert made["c"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: randn"):
        build_inputs(_build(a={"gen": "poisson", "shape": [1], "dtype": "compute"}))


@pytest.mark.parametrize("row", families.all_families(), ids=lambda row: row.key)
def test_the_meta_device_gives_the_same_shapes_and_the_seed_gives_the_same_values(row):
    real = list(tensors_of(build_inputs(row.tiny)))
    meta = list(tensors_of(build_inputs(row.tiny, device="meta")))
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in meta]
    assert all(t.is_meta for t in meta if t.is_floating_point() and row.key != "hunyuan_video_15")
    assert all(t.device.type == "cpu" for t in meta if not t.is_floating_point()), "they may decide shapes"
    again = list(tensors_of(build_inputs(row.tiny)))
    assert all(torch.equal(a, b) for a, b in zip(real, again, strict=True))
    other = list(tensors_of(build_inputs(row.tiny, seed=1)))
    assert not all(torch.equal(a, b) for a, b in zip(real, other, strict=True))


def test_other_resolutions_are_a_matter_of_overrides():
    flux = families.find("flux1")
    inputs = build_inputs(flux.real, over={"H": 256, "W": 512, "B": 3}, device="meta")
    assert inputs["hidden_states"].shape == (3, 16 * 32, 64)
    assert inputs["img_ids"].shape == (16 * 32, 3)
