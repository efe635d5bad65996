"""Nothing stays behind, whatever becomes of a step: for every family row and every kind of offload."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lowtide
from lowtide import families
from lowtide.errors import ConfigError
from lowtide.handle import Handle
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, loss_of, run_step
from lowtide.runtime.flatten import tensors_of
from lowtide.testing import cpu_offload
from tests.contract.cases import SEED, Case, make_case
from tests.contract.modes import OFFLOADS, Mode

MODES = [Mode("unsloth-ffn", offload_attention=True), Mode("unsloth-selective", "2"), Mode("mixed")]


@pytest.fixture
def mode(rotating: int) -> Mode:
    return MODES[rotating % len(MODES)]


@contextmanager
def _attached(case: Case, mode: Mode) -> Iterator[Handle]:
    with cpu_offload(), lowtide.attach(case.model, **mode.options(case.stacks)) as handle:
        yield handle


def _in_use_bytes(handle: Handle) -> int:
    return handle.receipt().totals["pool"]["in_use_bytes"]


class _Broken(Exception):
    pass


def _break(*_: object) -> None:
    raise _Broken


def _break_in_backward(module: nn.Module, args: object, output: object) -> None:
    next(tensor for tensor in tensors_of(output) if tensor.requires_grad).register_hook(_break)


def test_a_dropped_graph_gives_its_buffers_back(row, mode):
    case = make_case(row)
    with _attached(case, mode) as handle:
        outputs = case.model(**case.inputs)
        assert _in_use_bytes(handle) > 0
        del outputs
        assert _in_use_bytes(handle) == 0, "without the garbage collector"
        with torch.no_grad():  # an evaluation between steps
            case.model(**case.inputs)
        assert _in_use_bytes(handle) == 0
        assert compare(case.plain, case.step()) == []


def test_an_exception_in_forward_leaves_nothing(row, mode):
    case = make_case(row)
    with _attached(case, mode) as handle:
        hook = case.blocks()[-1][1].register_forward_pre_hook(_break)
        with pytest.raises(_Broken):
            case.step()
        hook.remove()
        assert handle.receipt().totals["d2h_bytes"] > 0, "it broke after something had moved"
        assert _in_use_bytes(handle) == 0
        assert compare(case.plain, case.step()) == []


def test_an_exception_in_backward_leaves_nothing(row, mode):
    case = make_case(row)
    middle = case.blocks()[len(case.blocks()) // 2][1]
    with _attached(case, mode) as handle:
        hook = middle.register_forward_hook(_break_in_backward)
        with pytest.raises(_Broken):
            case.step()
        hook.remove()
        # Nodes that were ready to run stay in autograd's queue until the thread's next backward, without lowtide too.
        torch.ones(1, requires_grad=True).sum().backward()
        assert _in_use_bytes(handle) == 0
        assert compare(case.plain, case.step()) == []


def test_two_forwards_before_their_backwards_and_other_shapes_between(row, mode):
    case = make_case(row)
    other = build_inputs(row.tiny, over={"B": 1} if "B" in row.tiny.vars else {"T": row.tiny.vars["T"] + 1})
    expected = run_step(case.model, other, SEED)
    case.model.zero_grad(set_to_none=True)
    with _attached(case, mode) as handle:
        assert compare(case.plain, case.step()) == []
        assert compare(expected, run_step(case.model, other, SEED)) == []
        waiting = case.model(**case.inputs)
        in_use_bytes = _in_use_bytes(handle)
        assert in_use_bytes > 0
        assert compare(case.plain, case.step()) == []
        assert _in_use_bytes(handle) == in_use_bytes
        del waiting
        assert _in_use_bytes(handle) == 0


def test_a_graph_may_be_run_backward_twice(row, mode):
    case = make_case(row)
    with _attached(case, mode) as handle:
        loss = loss_of(case.model(**case.inputs))
        weights = [weight for weight in case.model.parameters() if weight.requires_grad]
        first, second = (
            torch.autograd.grad(loss, weights, retain_graph=again, allow_unused=True) for again in (True, False)
        )
        for a, b in zip(first, second, strict=True):
            assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
        del loss
        assert _in_use_bytes(handle) == 0


def test_a_hundred_steps_of_changing_shapes_use_the_same_buffers():
    row = families.find("sd3_medium")
    case = make_case(row)
    inputs = [build_inputs(row.tiny, over={"B": batch}) for batch in (1, 2)]
    pools = []
    with _attached(case, Mode("mixed")) as handle:
        for number in range(100):
            run_step(case.model, inputs[number % 2], SEED)
            pools.append(handle.receipt().totals["pool"])
    assert all(pool["in_use_bytes"] == 0 for pool in pools)
    assert max(pool["buffers"] for pool in pools[90:]) <= max(pool["buffers"] for pool in pools[:10])
    assert all(pool["fallbacks"] == 0 for pool in pools)


def test_detaching_while_a_graph_lives_frees_its_buffers_after_its_backward(row):
    case = make_case(row)
    with _attached(case, Mode("unsloth-selective")) as handle:
        loss = loss_of(case.model(**case.inputs))
    assert _in_use_bytes(handle) > 0
    loss.backward()
    del loss
    pool = handle.receipt().totals["pool"]
    assert pool["in_use_bytes"] == pool["buffers"] == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to offload from")
@pytest.mark.parametrize("mode", [*map(Mode, OFFLOADS), Mode(None, offload_attention=True), Mode("mixed")], ids=str)
def test_offload_without_an_accelerator_is_an_error_that_says_so_and_attaches_nothing(mode):
    case = make_case(families.find("sd3_medium"))
    with pytest.raises(ConfigError, match="accelerator"):
        lowtide.attach(case.model, **mode.options(case.stacks))
    assert compare(case.plain, case.step()) == []
