"""What people give ``attach`` that is no model."""

from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxPipeline

import lowtide
from lowtide import families
from lowtide.errors import ConfigError
from lowtide.measure.build import build_model


def test_a_pipeline_is_told_which_part_to_give() -> None:
    denoiser: Any = build_model(families.find("flux1"), "tiny")
    none: Any = None
    pipeline: Any = FluxPipeline(none, none, none, none, none, none, denoiser)
    with pytest.raises(ConfigError, match="this is a FluxPipeline: give it the part that is trained, its .transformer"):
        lowtide.attach(pipeline)
    lowtide.attach(pipeline.transformer).detach()


@pytest.mark.parametrize("given", ["flux1", 3, None])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_what_is_no_module_is_named(given: Any, backend: str) -> None:
    with pytest.raises(ConfigError, match=f"takes a torch.nn.Module, and this is a {type(given).__name__}$"):
        lowtide.attach(given, backend=backend, vram_budget="1GiB" if backend == "auto" else None)


def test_a_family_of_another_model_is_refused() -> None:
    model = build_model(families.find("sd3_medium"), "tiny")
    told = r"family 'flux1' is of FluxTransformer2DModel, and this model is a SD3Transformer2DModel \(.*\). Leave"
    with pytest.raises(ConfigError, match=told):
        lowtide.attach(model, family="flux1")
    lowtide.attach(model, family="sd3").detach()


def test_a_warning_points_at_who_attached() -> None:
    model = build_model(families.find("sd3_medium"), "tiny")
    with pytest.warns(UserWarning, match="is wider than") as caught:
        lowtide.attach(model, interval=99).detach()
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
