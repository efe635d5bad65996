"""What people give ``attach`` that is no model."""

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
