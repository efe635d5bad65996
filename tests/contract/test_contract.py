"""What lowtide promises, for every family row: nothing changes but memory, and the receipt says what ran.

Tiny models in float32 on the CPU, where "equal" means bit for bit.
"""

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch

import lowtide
from lowtide import families
from lowtide.errors import ConfigError
from lowtide.handle import schedule_for
from lowtide.measure.held import trace_held
from lowtide.measure.parity import compare
from lowtide.plan.held import Held, predict

SETTINGS = {
    "1": {"interval": 1},
    "2": {"interval": 2},
    "3": {"interval": 3},
    "2of4": {"interval": 2, "segment_stride": 4},
}
BACKENDS = ("torch", "torch-ffn")

settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
backends = pytest.mark.parametrize("backend", BACKENDS)
trainings = pytest.mark.parametrize("training", ["full", "lora"])


def _treatments(case, backend, interval, segment_stride=None) -> dict[str, str]:
    """The treatment of every block, said again in the words of the documentation."""
    treated = "whole" if backend == "torch" else "ffn"
    found = {}
    for stack in case.stacks:
        for index, (name, block) in enumerate(stack.blocks):
            if segment_stride is not None:
                chosen = index % segment_stride < interval
            else:
                chosen = index % interval == 0 if treated == "ffn" else True
            possible = treated == "whole" or bool(stack.chains(block))
            found[name] = treated if chosen and possible else "kept"
    return found


def _sides(case, backend) -> list[tuple[str, torch.nn.Module]]:
    """The module of each block whose forward runs once more for each recomputation of the treated side."""
    if backend == "torch":
        return case.blocks()
    return [
        (name, chains[0][0][1])
        for stack in case.stacks
        for name, block in stack.blocks
        if (chains := stack.chains(block))
    ]


def _predicted(case, handle) -> Held:
    """From a plain forward of the same model, made before or after the attached one."""
    return predict(trace_held(case.model, case.stacks, case.inputs), handle.schedule)


def _recomputed_blocks(case, held: Held) -> set[str]:
    inside = [name for segment in held.segments for name in segment]
    return {name for name, _ in case.blocks() if any(part == name or part.startswith(f"{name}.") for part in inside)}


# ---------------------------------------------------------------------- parity and counts


@trainings
@settings
@backends
def test_loss_and_gradients_are_bit_equal_and_exactly_the_scheduled_blocks_run_again(
    row, backend, setting, training, make_case, forward_counter
):
    case = make_case(row, training)
    expected = _treatments(case, backend, **setting)
    forward_counter.watch(_sides(case, backend))
    with lowtide.attach(case.model, backend=backend, **setting) as handle:
        step = case.step()
        receipt = handle.receipt()
    assert compare(case.plain, step) == []

    again = {name: forward_counter.calls[name] - 1 for name, _ in _sides(case, backend)}
    need_gradients = _recomputed_blocks(case, _predicted(case, handle))
    if training == "full":
        assert need_gradients == {name for name, treatment in expected.items() if treatment != "kept"}
    for block in receipt.blocks:
        assert block.treatment == expected[block.name], block
        assert block.recompute_calls == (block.name in need_gradients), block
        assert block.recompute_calls == again.get(block.name, 0), block
        assert block.recompute_calls == 0 or block.reason is None, block


@backends
@pytest.mark.parametrize(
    ("key", "variant"), [(row.key, variant) for row in families.all_families() for variant in row.variants]
)
def test_inputs_of_other_kinds_of_training_give_the_same_gradients(key, variant, backend, make_case):
    case = make_case(families.find(key), variant=variant)
    for setting in (SETTINGS["2"], SETTINGS["2of4"]):
        with lowtide.attach(case.model, backend=backend, **setting):
            assert compare(case.plain, case.step()) == []


CONTROLNETS = [row for row in families.all_families() if "ControlNet residuals" in row.variants]


@pytest.mark.parametrize("row", CONTROLNETS, ids=[row.key for row in CONTROLNETS])
def test_a_controlnet_residual_ends_segments_and_the_receipt_says_where_and_why(row, make_case):
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
    plain_segments = len(_predicted(make_case(row), handle).segments)
    assert len({(block.stack, block.segment) for block in receipt.blocks}) > plain_segments


# ---------------------------------------------------------------------- bytes


def _close(a: int, b: int) -> bool:
    return abs(a - b) <= 0.01 * max(a, b)


@trainings
@settings
@backends
def test_saved_bytes_are_as_predicted(row, backend, setting, training, make_case, saved_bytes):
    case = make_case(row, training)
    with lowtide.attach(case.model, backend=backend, **setting) as handle, saved_bytes(case.model) as seen:
        outputs = case.model(**case.inputs)
        held_bytes = seen.total
    del outputs
    assert seen.total == 0, "a dropped graph leaves nothing behind"
    predicted = _predicted(case, handle)
    assert _close(held_bytes, predicted.held_bytes)
    with saved_bytes(case.model) as seen:
        outputs = case.model(**case.inputs)
        assert _close(seen.total, predicted.plain_bytes)
    del outputs
    assert predicted.held_bytes < predicted.plain_bytes


@trainings
@settings
@backends
def test_the_receipt_counts_the_bytes_that_were_predicted(row, backend, setting, training, make_case):
    case = make_case(row, training)
    with lowtide.attach(case.model, backend=backend, **setting) as handle:
        case.step()
        totals = handle.receipt().totals
    predicted = _predicted(case, handle)
    assert _close(totals["kept_bytes"], predicted.kept_bytes)
    assert _close(totals["recomputed_bytes"], predicted.recomputed_bytes)


# ---------------------------------------------------------------------- the model stays itself


def _identity(model) -> list[tuple[str, type, tuple[str, ...]]]:
    return [(name, type(module), tuple(sorted(vars(module)))) for name, module in model.named_modules()]


def _names(pairs: Iterable[tuple[str, object]]) -> list[str]:
    return [name for name, _ in pairs]


@backends
def test_names_keys_and_classes_are_unchanged_and_detach_is_exact(row, backend, make_case):
    case = make_case(row)
    model = case.model
    before, keys = _identity(model), list(model.state_dict())
    modules, parameters = (_names(model.named_modules()), _names(model.named_parameters()))
    handle = lowtide.attach(model, backend=backend)
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


@backends
def test_a_deep_copy_is_unattached_and_trains_its_own_weights(row, backend, make_case):
    case = make_case(row)
    with lowtide.attach(case.model, backend=backend, interval=2) as handle:
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


def test_a_pickle_comes_back_as_the_original_unattached(row, make_case):
    case = make_case(row)
    kinds = [type(module) for module in case.model.modules()]
    with lowtide.attach(case.model, interval=2):
        again = pickle.loads(pickle.dumps(case.model))
    assert [type(module) for module in again.modules()] == kinds
    assert compare(case.plain, case.step(again)) == []


def test_two_models_attached_at_once_keep_their_own_settings(row, make_case):
    first, second = make_case(row), make_case(row, "lora")
    with (
        lowtide.attach(first.model, interval=2) as wide,
        lowtide.attach(second.model, backend="torch-ffn", interval=2) as narrow,
    ):
        steps = [(case, case.step()) for case in (first, second, first)]
        receipts = wide.receipt(), narrow.receipt()
    for case, step in steps:
        assert compare(case.plain, step) == []
    for receipt, case, backend in zip(receipts, (first, second), BACKENDS, strict=True):
        treatments = {block.name: block.treatment for block in receipt.blocks}
        assert treatments == _treatments(case, backend, interval=2)


def test_attaching_twice_is_refused_and_changes_nothing(row, make_case):
    case = make_case(row)
    with lowtide.attach(case.model):
        with pytest.raises(ConfigError, match="attached already"):
            lowtide.attach(case.model, interval=2)
        assert compare(case.plain, case.step()) == []


# ---------------------------------------------------------------------- the receipt


@settings
@backends
def test_the_receipt_lists_every_block_of_every_stack_in_order(row, backend, setting, make_case):
    case = make_case(row)
    with lowtide.attach(case.model, backend=backend, **setting) as handle:
        case.step()
        blocks = handle.receipt().as_dict()["blocks"]
        assert handle.schedule == schedule_for(handle.stacks, handle.config)
    listed = [(block["stack"], block["index"], block["name"]) for block in blocks]
    assert listed == [
        (stack.name, index, name) for stack in case.stacks for index, (name, _) in enumerate(stack.blocks)
    ]
    if backend == "torch":
        _assert_segments(case, blocks, **setting)


def _assert_segments(case, blocks, interval, segment_stride=None):
    """Blocks share a segment number only with neighbours of their planned segment."""
    stride = segment_stride or interval
    members: dict[int, list[tuple[str, int]]] = {}
    for block in blocks:
        if block["segment"] is not None:
            members.setdefault(block["segment"], []).append((block["stack"], block["index"]))
    for segment in members.values():
        indices = [index for _, index in segment]
        assert len({stack for stack, _ in segment}) == 1
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert len({index // stride for index in indices}) == 1
    if case.row.key != "sdxl":  # between its micro-blocks the model makes a new carry
        assert max(map(len, members.values())) == interval


def test_nothing_happens_without_gradients(row, make_case):
    case = make_case(row)
    with lowtide.attach(case.model, interval=2) as handle:
        with torch.no_grad():
            outputs = case.model(**case.inputs)
        assert handle.receipt().totals == dict.fromkeys(handle.receipt().totals, 0)
        assert compare(case.plain, case.step()) == []
    assert outputs is not None
