"""What lowtide promises of the model that it is attached to, for every family row: it stays itself.

What it promises of a step is in test_steps.py.
"""

import copy
import pickle
from collections.abc import Iterable, Iterator

import pytest
import torch

import lowtide
from lowtide import families
from lowtide.errors import ConfigError
from lowtide.handle import Handle
from lowtide.measure.parity import compare
from lowtide.plan.held import predict
from lowtide.testing import cpu_offload
from tests.contract.cases import Case, make_case, trace_of
from tests.contract.modes import TREATED, Mode, expected_treatments

SHAPES = [Mode("torch", "2"), Mode("unsloth-ffn", offload_attention=True), Mode("unsloth-selective")]
"""Ways to attach that intercept different modules."""


@pytest.fixture
def mode(rotating: int) -> Mode:
    return SHAPES[rotating % len(SHAPES)]


def _attach(case: Case, mode: Mode) -> Handle:
    return lowtide.attach(case.model, **mode.options(case.stacks))


@pytest.fixture(autouse=True)
def _offload_on_the_cpu() -> Iterator[None]:
    with cpu_offload():
        yield


# ---------------------------------------------------------------------- other inputs


@pytest.mark.parametrize("backend", TREATED)
@pytest.mark.parametrize(
    ("key", "variant"), [(row.key, variant) for row in families.all_families() for variant in row.variants]
)
def test_inputs_of_other_kinds_of_training_give_the_same_gradients(key, variant, backend):
    case = make_case(families.find(key), variant=variant)
    with _attach(case, Mode(backend, "2of4", offload_attention=backend != "unsloth-selective")):
        assert compare(case.plain, case.step()) == []


CONTROLNETS = [row for row in families.all_families() if "ControlNet residuals" in row.variants]


@pytest.mark.parametrize("row", CONTROLNETS, ids=[row.key for row in CONTROLNETS])
def test_a_controlnet_residual_ends_segments_and_the_receipt_says_where_and_why(row):
    case = make_case(row, variant="ControlNet residuals")
    with lowtide.attach(case.model, interval=3) as handle:
        step = case.step()
        receipt = handle.receipt()
    assert compare(case.plain, step) == []
    assert receipt.fallbacks
    names = {block.name for block in receipt.blocks}
    assert {note.subject for note in receipt.fallbacks} <= names
    assert all("not what the block before returned" in note.reason for note in receipt.fallbacks)
    assert all(block.treatment == "whole" and block.recompute_calls == 1 for block in receipt.blocks)
    plain_segments = len(predict(trace_of(row.key, "full"), handle.schedule).segments)
    assert len({(block.stack, block.segment) for block in receipt.blocks}) > plain_segments


# ---------------------------------------------------------------------- the model stays itself


def _identity(model) -> list[tuple[str, type, tuple[str, ...]]]:
    return [(name, type(module), tuple(sorted(vars(module)))) for name, module in model.named_modules()]


def _names(pairs: Iterable[tuple[str, object]]) -> list[str]:
    return [name for name, _ in pairs]


def test_names_keys_and_classes_are_unchanged_and_detach_is_exact(row, mode):
    case = make_case(row)
    model = case.model
    before, keys = _identity(model), list(model.state_dict())
    modules, parameters = (_names(model.named_modules()), _names(model.named_parameters()))
    handle = _attach(case, mode)
    assert list(model.state_dict()) == keys
    assert _names(model.named_modules()) == modules
    assert _names(model.named_parameters()) == parameters
    for (_, kind, _), module in zip(before, model.modules(), strict=True):
        assert isinstance(module, kind)
        assert (type(module).__name__, type(module).__qualname__) == (kind.__name__, kind.__qualname__)
        assert type(module).__module__ == kind.__module__
    case.step()
    handle.detach()
    model.zero_grad(set_to_none=True)
    assert _identity(model) == before
    assert compare(case.plain, case.step()) == []


def test_a_deep_copy_is_unattached_and_trains_its_own_weights(row, mode):
    case = make_case(row)
    with _attach(case, mode) as handle:
        case.step()
        twin = copy.deepcopy(case.model)
        before = handle.receipt().as_dict()
        with torch.no_grad():
            for weight in twin.parameters():
                weight.mul_(1.25)
        changed = case.step(twin)
        assert handle.receipt().as_dict() == before, "a step of the copy must not count for the original"
        assert compare(case.plain, case.step()) == [], "the original keeps its own weights"
    assert not torch.equal(changed.loss, case.plain.loss)
    assert [type(module) for module in twin.modules()] == [type(module) for module in case.model.modules()]
    reference = make_case(row)
    with torch.no_grad():
        for weight in reference.model.parameters():
            weight.mul_(1.25)
    assert compare(reference.step(), changed) == []


def test_a_pickle_comes_back_as_the_original_unattached(row):
    case = make_case(row)
    kinds = [type(module) for module in case.model.modules()]
    with lowtide.attach(case.model, interval=2):
        again = pickle.loads(pickle.dumps(case.model))
    assert [type(module) for module in again.modules()] == kinds
    assert compare(case.plain, case.step(again)) == []


def test_two_models_attached_at_once_keep_their_own_settings(row):
    first, second = make_case(row), make_case(row, "lora")
    with (
        lowtide.attach(first.model, interval=2) as wide,
        lowtide.attach(second.model, backend="torch-ffn", interval=2) as narrow,
    ):
        steps = [(case, case.step()) for case in (first, second, first)]
        receipts = wide.receipt(), narrow.receipt()
    for case, step in steps:
        assert compare(case.plain, step) == []
    for receipt, case, backend in zip(receipts, (first, second), ("torch", "torch-ffn"), strict=True):
        treatments = {block.name: block.treatment for block in receipt.blocks}
        assert treatments == expected_treatments(case, Mode(backend, "2"))


def test_attaching_twice_is_refused_and_changes_nothing(row):
    case = make_case(row)
    with lowtide.attach(case.model):
        with pytest.raises(ConfigError, match="attached already"):
            lowtide.attach(case.model, interval=2)
        assert compare(case.plain, case.step()) == []


def test_nothing_happens_without_gradients(row):
    case = make_case(row)
    with _attach(case, Mode("unsloth-selective")) as handle:
        with torch.no_grad():
            outputs = case.model(**case.inputs)
        totals = handle.receipt().totals
        assert not any(totals.pop("pool").values())
        assert totals == dict.fromkeys(totals, 0)
        assert compare(case.plain, case.step()) == []
    assert outputs is not None
