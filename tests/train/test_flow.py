"""Flow matching, and that the model is called exactly as its own pipeline calls it."""

from typing import Any

import pytest
import torch

from lowtide.train.families import train_row
from lowtide.train.families.base import Denoiser
from lowtide.train.flow import Batch, add_noise, fixed_loss, loss_of, random_noise
from lowtide.train.loop import load_batch
from lowtide.train.prepare import Prepared

CPU = torch.device("cpu")


@pytest.fixture
def denoiser(prepared: Prepared) -> Denoiser:
    return prepared.row.open_denoiser(prepared.config.keys.pipeline, CPU, torch.float32)


@pytest.fixture
def batch(prepared: Prepared) -> Batch:
    return load_batch(prepared.cached, (1, 2), CPU)


def test_the_line_from_picture_to_noise() -> None:
    picture, noise = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    noised = add_noise(picture, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.equal(noised.latents[0], picture[0]) and torch.equal(noised.latents[2], noise[2])
    assert torch.allclose(noised.latents[1] - 0.25 * noised.target[1], picture[1], atol=1e-6)


def test_the_loss_of_a_perfect_model_is_zero(batch: Batch) -> None:
    class Perfect(Denoiser):
        model = torch.nn.Identity()

        def velocity(self, noisy: Any, sigmas: Any, text: Any) -> torch.Tensor:
            return (noisy - batch.latents) / sigmas.view(-1, 1, 1, 1)

        arguments = tokens = shift = sample = save_lora = load_lora = save_model = load_model = None  # type: ignore[assignment]

    noised = add_noise(batch.latents, torch.randn_like(batch.latents), torch.tensor([0.3, 0.9]))
    assert loss_of(Perfect(), noised, batch.text) < 1e-10
    assert abs(fixed_loss(Perfect(), [batch])) < 1e-8


def test_the_fixed_loss_never_changes_and_touches_no_random_state(denoiser: Denoiser, batch: Batch) -> None:
    denoiser.model.train()
    state = torch.get_rng_state()
    first = fixed_loss(denoiser, [batch])
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert fixed_loss(denoiser, [batch]) == first
    assert denoiser.model.training
    with torch.no_grad():
        next(denoiser.model.parameters()).mul_(1.5)
    assert fixed_loss(denoiser, [batch]) != first


def test_noise_comes_from_the_generator_alone(denoiser: Denoiser, batch: Batch) -> None:
    draws = [random_noise(denoiser, batch.latents, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(draws[0].latents, draws[1].latents) and torch.equal(draws[0].sigmas, draws[1].sigmas)
    assert ((draws[0].sigmas > 0) & (draws[0].sigmas < 1)).all()


def pipeline_call(prepared: Prepared, size: tuple[int, int], **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """A stock pipeline's first call of its transformer: the pipeline, the arguments, the output."""
    from diffusers import FluxPipeline

    pipe: Any = FluxPipeline.from_pretrained(str(prepared.config.keys.pipeline), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    calls: list[Any] = []
    pipe.transformer.register_forward_hook(lambda m, args, kwargs, out: calls.append((kwargs, out)), with_kwargs=True)
    text = prepared.cached.load_text(1)
    pipe(
        prompt_embeds=text["prompt"][None],
        pooled_prompt_embeds=text["pooled"][None],
        width=size[0],
        height=size[1],
        guidance_scale=1.0,
        output_type="latent",
        **options,
    )
    return pipe, *calls[0]


def test_arguments_and_velocity_are_those_of_the_pipeline(prepared: Prepared, denoiser: Denoiser) -> None:
    size = prepared.cached.buckets[1]
    assert size[0] != size[1]
    latents = torch.randn(1, 4, size[1] // 8, size[0] // 8)
    from diffusers import FluxPipeline

    packed = FluxPipeline._pack_latents(latents, *latents.shape)
    _, theirs, output = pipeline_call(prepared, size, latents=packed, num_inference_steps=1)
    text = {name: tensor[None] for name, tensor in prepared.cached.load_text(1).items()}
    sigmas = theirs["timestep"]
    ours = denoiser.arguments(latents, sigmas, text)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    text_tokens = ours["encoder_hidden_states"].shape[1]
    assert denoiser.tokens(size, text_tokens) == ours["hidden_states"].shape[1] + text_tokens
    with torch.no_grad():
        velocity = denoiser.velocity(latents, sigmas, text)
    assert torch.equal(FluxPipeline._pack_latents(velocity, *latents.shape), output[0])


def test_sigmas_are_shifted_as_the_pipeline_shifts_them(prepared: Prepared, denoiser: Denoiser) -> None:
    size = prepared.cached.buckets[1]
    pipe, *_ = pipeline_call(prepared, size, num_inference_steps=5)
    plain = torch.linspace(1, 1 / 5, 5)
    shifted = denoiser.shift(plain, torch.empty(1, 4, size[1] // 8, size[0] // 8))
    assert torch.allclose(shifted, pipe.scheduler.sigmas[:-1], atol=1e-6)
    assert not torch.allclose(shifted, plain, atol=1e-2)


def test_a_fixed_shift_is_honoured_too(denoiser: Denoiser) -> None:
    scheduler: Any = denoiser._pipeline.scheduler  # type: ignore[attr-defined]
    scheduler.register_to_config(use_dynamic_shifting=False, shift=3.0)
    assert torch.allclose(denoiser.shift(torch.tensor([0.5]), torch.empty(1, 4, 8, 8)), torch.tensor([0.75]))


def test_lora_goes_on_attention_and_feed_forward_of_every_block(denoiser: Denoiser) -> None:
    import re

    names = [name for name, module in denoiser.model.named_modules() if isinstance(module, torch.nn.Linear)]
    hit = {name for name in names if re.fullmatch(train_row("flux1").lora_targets, name)}
    missed = {re.sub(r"\d+", "N", name) for name in names if name not in hit}
    assert missed == {
        "time_text_embed.timestep_embedder.linear_N",
        "time_text_embed.guidance_embedder.linear_N",
        "time_text_embed.text_embedder.linear_N",
        "context_embedder",
        "x_embedder",
        "transformer_blocks.N.normN.linear",
        "transformer_blocks.N.normN_context.linear",
        "single_transformer_blocks.N.norm.linear",
        "norm_out.linear",
        "proj_out",
    }
