"""What attaching leaves unchanged, and how it is undone (rules 15, 18, 19)."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.plan.schedule import Schedule, whole_blocks
from lowtide.runtime.resolve import expand, resolve
from lowtide.runtime.swap import is_attached
from tests.runtime.toys import Block, Chain, assert_equal, chain, inputs, step


def test_names_types_and_state_are_unchanged() -> None:
    model = chain()
    before = (list(model.state_dict()), [name for name, _ in model.named_modules()], repr(model))
    with lowtide.attach(model):
        assert (list(model.state_dict()), [name for name, _ in model.named_modules()], repr(model)) == before
        for block in model.blocks:
            assert isinstance(block, Block)
            assert (type(block).__name__, type(block).__qualname__, type(block).__module__) == (
                Block.__name__,
                Block.__qualname__,
                Block.__module__,
            )
            assert "forward" not in block.__dict__
        assert len({type(block) for block in model.blocks}) == 1
    assert all(type(block) is Block for block in model.blocks)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_come_back_unattached_with_their_own_weights(duplicate: object) -> None:
    model, x = chain(), inputs()
    with lowtide.attach(model, interval=2) as handle:
        twin = duplicate(model)  # type: ignore[operator]
        assert all(type(block) is Block for block in twin.blocks)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        changed = twin(x).detach()
        assert not torch.equal(changed, model(x))
        step(twin, lambda: twin(x))
        assert [block.calls for block in twin.blocks] == [2] * 4  # nothing recomputed in the copy
        step(model, lambda: model(x))
        assert handle.receipt().totals["recompute_calls"] == 4


def test_detach_twice_and_attach_again() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    handle = lowtide.attach(model)
    handle.detach()
    handle.detach()
    with lowtide.attach(model, interval=2) as again:
        assert_equal(plain, step(model, lambda: model(x)))
        assert again.receipt().totals["recompute_calls"] == 4


def test_detach_leaves_a_class_that_somebody_else_changed_since() -> None:
    model, x = chain(), inputs()
    plain = step(model, lambda: model(x))
    handle = lowtide.attach(model)
    ours = type(model.blocks[0])
    theirs = type("Sharded", (ours,), {})
    model.blocks[0].__class__ = theirs
    handle.detach()
    assert type(model.blocks[0]) is theirs
    assert type(model.blocks[1]) is Block
    calls = model.blocks[0].calls
    assert_equal(plain, step(model, lambda: model(x)))
    assert model.blocks[0].calls == calls + 1


def test_explicit_schedule() -> None:
    model, x = chain(5), inputs()
    schedule = Schedule({"blocks": whole_blocks(5, 2, 3)})
    with lowtide.attach(model, schedule=schedule) as handle:
        step(model, lambda: model(x))
        receipt = handle.receipt()
    assert [block.segment for block in receipt.blocks] == [0, 0, None, 1, 1]
    with pytest.raises(ConfigError, match="says by itself what is done with every block: leave interval out"):
        lowtide.attach(model, schedule=schedule, interval=2)
    with pytest.raises(ConfigError, match="schedule is for stacks"):
        lowtide.attach(model, schedule=Schedule({"blocks": whole_blocks(4)}))


def test_inert_options_are_named() -> None:
    model, x = Chain([Block() for _ in range(4)], lambda index, value: value * 1), inputs()
    with lowtide.attach(model, interval=2, segment_stride=2) as handle:
        step(model, lambda: model(x))
        receipt = handle.receipt().as_dict()
    assert [note["option"] for note in receipt["inert"]] == ["interval", "segment_stride"]
    assert [note["block"] for note in receipt["fallbacks"]] == ["blocks.1", "blocks.3"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Level(2, 2) for _ in range(2))
        self.mid = Level(2, 1)


class Level(nn.Module):
    def __init__(self, resnets: int, attentions: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Block() for _ in range(resnets))
        self.attentions = nn.ModuleList(Chain([Block(), Block()]) for _ in range(attentions))


def test_patterns_interleave_in_call_order() -> None:
    names = [name for name, _ in expand(Net(), "down.*.{resnets.#|attentions.#.blocks.*}")]
    assert names[:6] == [
        "down.0.resnets.0",
        "down.0.attentions.0.blocks.0",
        "down.0.attentions.0.blocks.1",
        "down.0.resnets.1",
        "down.0.attentions.1.blocks.0",
        "down.0.attentions.1.blocks.1",
    ]
    assert [name for name, _ in expand(Net(), "mid.{resnets.#|attentions.#.blocks.*}")][-1] == "mid.resnets.1"


def test_stacks_are_found_by_structure() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    (stack,) = resolve(transformers.CLIPTextModel(config), None)
    assert stack.found
    assert len(stack.blocks) == 3
    assert stack.row.feed_forward == (("layer_norm2", "mlp"),)
    assert stack.row.attention == ("self_attn",)
    (alone,) = resolve(nn.Sequential(*chain(3).blocks), None)
    assert [path for path, _ in alone.blocks] == ["0", "1", "2"] and alone.name == "Sequential"
    with pytest.raises(UnsupportedError, match="no block stack was found"):
        resolve(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None)
    layers = [nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) for _ in range(3)]
    with pytest.raises(UnsupportedError, match=r"two layers that multiply \(Linear, .* norms .*not count"):
        resolve(nn.ModuleList(layers), None)


def test_a_handle_that_is_detached_twice_harms_no_other() -> None:
    model, x = chain(4), inputs()
    first = lowtide.attach(model)
    first.detach()
    with lowtide.attach(model) as second:
        first.detach()
        step(model, lambda: model(x))
        assert second.receipt().totals["recompute_calls"] == 4
    with lowtide.attach(model) as outer:
        outer.detach()
        inner = lowtide.attach(model, interval=2)
    step(model, lambda: model(x))
    assert inner.receipt().totals["recompute_calls"] == 4
    inner.detach()
    assert not any(is_attached(block) for block in model.blocks)
