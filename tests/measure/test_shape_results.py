"""What is remembered of operators is what they would give, and nothing is remembered where shapes do not decide it."""

from typing import Any

import pytest
import torch

from lowtide.measure import shapes
from lowtide.measure.build import open_target
from lowtide.measure.held import trace_held
from lowtide.measure.shape_results import ShapeResults
from lowtide.runtime.resolve import resolve

aten = torch.ops.aten


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.calls = operator, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.operator(*args, **kwargs)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def kinds(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(kinds, value))
    return value if value is None else (value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes())


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mm.default, (meta(3, 4), meta(5, 4).t())),
        (aten.native_layer_norm.default, (meta(2, 3, 4), [4], meta(4), None, 1e-5)),
        (aten.add.Tensor, (meta(4, 3).t(), meta(3, 4))),
        (aten._to_copy.default, (meta(4, 3).t(),)),
        (aten.cat.default, ([meta(2, 3), meta(4, 3)],)),
    ],
)
def test_a_second_call_runs_nothing_and_gives_the_same(operator: Any, args: tuple[Any, ...]) -> None:
    results, counted = ShapeResults(), Counted(operator)
    first, second = (results.of(counted, args, {}) for _ in range(2))
    assert counted.calls == 1
    assert kinds(first) == kinds(second) == kinds(operator(*args))


def test_each_second_result_has_a_storage_of_its_own() -> None:
    results, x = ShapeResults(), meta(3)
    made = [results.of(aten.neg.default, (x,), {}) for _ in range(3)]
    assert len({one.untyped_storage()._cdata for one in (x, *made)}) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((meta(3), 1), (meta(3), 1.0)),
        ((meta(3, dtype=torch.int64), True), (meta(3, dtype=torch.int64), 1.5)),
        ((meta(3), meta(3)), (meta(3), meta(3, dtype=torch.bfloat16))),
        ((meta(3, 3), meta(3, 3)), (meta(3, 3).t(), meta(3, 3).t())),
        ((meta(3), meta(3)), (meta(3), meta(1))),
    ],
)
def test_what_differs_runs_again(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    results, counted = ShapeResults(), Counted(aten.mul.Tensor)
    for args in (one, other):
        assert kinds(results.of(counted, args, {})) == kinds(aten.mul.Tensor(*args))
    assert counted.calls == 2


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten._unsafe_view.default, (meta(2, 3), [6])),  # its schema says nothing of the storage that it shares
        (aten.mul.Tensor, (meta(2, dtype=torch.complex64), 2)),
        (aten.mul.Tensor, (meta(2), torch.tensor(2.0))),  # of a number's own kind, and not on the meta device
        (aten.split.Tensor, (meta(4), 2)),
    ],
)
def test_what_more_than_shapes_decides_runs_each_time(operator: Any, args: tuple[Any, ...]) -> None:
    results, counted = ShapeResults(), Counted(operator)
    for _ in range(2):
        results.of(counted, args, {})
    assert counted.calls == 2


def test_the_default_dtype_is_part_of_what_is_given() -> None:
    results, x = ShapeResults(), meta(4, dtype=torch.int64)
    assert results.of(aten.div.Tensor, (x, 2), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert results.of(aten.div.Tensor, (x, 2), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_conjugate_results_are_not_remembered() -> None:
    with torch.inference_mode():
        results, x = ShapeResults(), meta(8)
        made = [results.of(torch.ops.aten.fft_ifft.default, (x,), {}).is_conj() for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.parametrize("key", ["flux1", "sdxl", "wan21_1_3b", "hidream", "chroma", "ltx2_3"])
def test_a_trace_is_the_same_where_every_operator_runs(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> Any:
        target = open_target(key, "tiny", device="meta")
        inputs = target.inputs(device="meta")
        trace = trace_held(target.model, resolve(target.model, None), inputs, as_on_gpu=True)
        saved = [sorted(trace.sizes_bytes.get(storage, 0) for storage in call.saved) for call in trace.calls]
        return saved, [call.work for call in trace.calls]

    ran = []
    remembered = traced()

    class Forgetful:
        def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            ran.append(func)
            return func(*args, **kwargs)

    monkeypatch.setattr(shapes, "ShapeResults", Forgetful)
    assert remembered == traced()
    assert ran
