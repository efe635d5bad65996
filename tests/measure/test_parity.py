"""Comparing two steps: what counts as the same, and that a difference is always named."""

import dataclasses

import pytest
import torch
from torch import nn

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.measure.build import Target, build_model, open_target
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, fresh, loss_of, run_step, verify


@pytest.fixture
def step():
    flux = families.find("flux1")
    return run_step(build_model(flux), build_inputs(flux.tiny), seed=3)


def test_a_step_repeats_bit_for_bit():
    sana = families.find("sana")
    model, inputs = build_model(sana), build_inputs(sana.tiny)
    assert compare(run_step(model, inputs, 3), run_step(model, inputs, 3)) == []


def test_one_wrong_element_is_found_and_measured(step):
    name = "single_transformer_blocks.3.attn.to_q.weight"
    gradient = step.gradients[name].clone()
    gradient[0, 0] += 0.5
    other = dataclasses.replace(step, gradients={**step.gradients, name: gradient})
    (difference,) = compare(step, other)
    assert difference.tensor == f"gradient of {name}"
    assert difference.max_abs == pytest.approx(0.5)
    assert str(difference) == f"gradient of {name}: differs by up to 0.5"


def test_a_missing_gradient_is_found_on_either_side(step):
    name = "proj_out.weight"
    other = dataclasses.replace(step, gradients={**step.gradients, name: None})
    assert [str(found) for found in compare(step, other)] == [f"gradient of {name}: only the first step has it"]
    assert [str(found) for found in compare(other, step)] == [f"gradient of {name}: only the second step has it"]


def test_another_dtype_shape_or_number_of_outputs_is_a_difference(step):
    assert compare(step, dataclasses.replace(step, loss=step.loss.double()))
    assert compare(step, dataclasses.replace(step, outputs=(step.outputs[0][:1],)))
    assert compare(step, dataclasses.replace(step, outputs=()))


def test_a_loss_that_is_no_number_is_a_difference_even_to_itself(step):
    broken = dataclasses.replace(step, loss=torch.tensor(float("nan")))
    assert [found.tensor for found in compare(broken, broken)] == ["loss"]


def test_the_loss_sees_every_element():
    outputs = torch.randn(2, 3, requires_grad=True)
    loss_of([outputs, {"more": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}]).backward()
    assert outputs.grad is not None and bool(outputs.grad.all())
    assert outputs.grad.unique().numel() == outputs.numel()


def test_fresh_copies_every_tensor_and_keeps_the_structure():
    inputs = {"a": torch.ones(2), "b": [torch.ones(1), (None, 3)], "c": {"d": "text"}}
    copied = fresh(inputs)
    copied["a"].add_(1)
    copied["b"][0].add_(1)
    assert inputs["a"].tolist() == [1, 1] and inputs["b"][0].tolist() == [1]
    assert copied["b"][1] == (None, 3) and copied["c"] == {"d": "text"}


def test_verify_reports_the_settings_the_gradients_and_what_ran():
    report = verify(open_target("flux1"), backend="torch", interval=2, segment_stride=4)
    assert report.same and report.differences == ()
    assert report.label == "Flux.1"
    assert report.options == {"backend": "torch", "interval": 2, "segment_stride": 4}
    assert report.gradients == len(list(build_model(families.find("flux1")).parameters()))
    assert report.receipt["totals"]["recompute_calls"] == 8


def test_verify_takes_other_sizes_and_leaves_the_model_as_it_was():
    target = open_target("sana")
    kinds = [type(module) for module in target.model.modules()]
    assert verify(target, over={"H": 128, "B": 1}, backend="torch-ffn").same
    assert [type(module) for module in target.model.modules()] == kinds
    assert all(weight.grad is None for weight in target.model.parameters())


class _CountsItsCalls(nn.Module):
    """A block that does something else each time: recomputation cannot give what the forward gave."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        encoder_hidden_states, hidden_states = self.block(*args, **kwargs)
        return encoder_hidden_states, hidden_states * (1 + 1e-4 * self.calls)


def test_verify_finds_a_model_that_no_recomputation_can_repeat():
    target = open_target("flux1")
    blocks = target.model.get_submodule("transformer_blocks")
    blocks[0] = _CountsItsCalls(blocks[0])
    report = verify(target)
    assert not report.same
    assert "loss" in {difference.tensor for difference in report.differences}


def test_verify_needs_inputs_that_a_family_describes():
    target = Target("a linear layer", nn.Linear(2, 2), None, None, {})
    with pytest.raises(ConfigError, match="Linear, which no family describes"):
        verify(target)


def test_wrong_options_are_refused_before_anything_is_attached():
    target = open_target("flux1")
    kinds = [type(module) for module in target.model.modules()]
    with pytest.raises(ConfigError):
        verify(target, interval=0)
    assert [type(module) for module in target.model.modules()] == kinds
