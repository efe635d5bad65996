"""Flux.1: what its pipeline needs for training."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lowtide.measure.build import import_class
from lowtide.train.families.base import Denoiser, Encoders, TrainRow
from lowtide.train.loading import load_pipeline, read_config

FluxPipeline = import_class("diffusers.FluxPipeline")

_TRAIN_GUIDANCE = 1.0
_SAMPLE_GUIDANCE = 3.5
_TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


class FluxEncoders(Encoders):
    def __init__(self, pipeline: Any, text_tokens: int) -> None:
        self._pipeline = pipeline
        self._text_tokens = text_tokens

    @classmethod
    def open(cls, folder: Path, device: torch.device, dtype: torch.dtype, text_tokens: int) -> "FluxEncoders":
        pipeline = load_pipeline(FluxPipeline, folder, dtype, without=("transformer",))
        return cls(pipeline.to(device), text_tokens)

    @torch.no_grad()
    def latents(self, pixels: Tensor) -> Tensor:
        vae = self._pipeline.vae
        encoded = vae.encode(pixels.to(vae.device, torch.float32)).latent_dist.mode()
        normal = (encoded - vae.config.shift_factor) * vae.config.scaling_factor
        return normal[0].float().cpu()

    @torch.no_grad()
    def text(self, caption: str) -> dict[str, Tensor]:
        tokens = len(self._pipeline.tokenizer_2(caption).input_ids)
        if tokens > self._text_tokens:
            warnings.warn(
                f"a caption has {tokens} tokens; what comes after {self._text_tokens} is not used "
                f"(tokenizer_max_length): {caption[:60]}…",
                stacklevel=2,
            )
        prompt, pooled, _ = self._pipeline.encode_prompt(caption, None, max_sequence_length=self._text_tokens)
        return {"prompt": prompt[0].cpu(), "pooled": pooled[0].cpu()}


class FluxDenoiser(Denoiser):
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.model = pipeline.transformer

    @classmethod
    def open(cls, folder: Path, device: torch.device, dtype: torch.dtype) -> "FluxDenoiser":
        pipeline = load_pipeline(FluxPipeline, folder, dtype, without=_TEXT_PARTS)
        pipeline.transformer.to(device)
        return cls(pipeline)

    def arguments(self, noisy: Tensor, sigmas: Tensor, text: Mapping[str, Tensor]) -> dict[str, Any]:
        batch, channels, height, width = noisy.shape
        prompt = text["prompt"]
        ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype)
        guided = self._pipeline.transformer.config.guidance_embeds
        return {
            "hidden_states": FluxPipeline._pack_latents(noisy, batch, channels, height, width),
            "encoder_hidden_states": prompt,
            "pooled_projections": text["pooled"],
            "timestep": sigmas,
            "img_ids": ids,
            "txt_ids": torch.zeros(prompt.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
            "guidance": torch.full_like(sigmas, _TRAIN_GUIDANCE) if guided else None,
        }

    def velocity(self, noisy: Tensor, sigmas: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        packed = self.model(**self.arguments(noisy, sigmas, text), return_dict=False)[0]
        factor = self._pipeline.vae_scale_factor
        height, width = (side * factor for side in noisy.shape[-2:])
        return FluxPipeline._unpack_latents(packed, height, width, factor)

    def tokens(self, size: tuple[int, int], text_tokens: int) -> int:
        side = 2 * self._pipeline.vae_scale_factor
        return (size[0] // side) * (size[1] // side) + text_tokens

    def shift(self, sigmas: Tensor, latents: Tensor) -> Tensor:
        scheduler = self._pipeline.scheduler
        if not scheduler.config.use_dynamic_shifting:
            shift = scheduler.config.shift
            return shift * sigmas / (1 + (shift - 1) * sigmas)
        config = scheduler.config
        tokens = latents.shape[-2] * latents.shape[-1] // 4
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        return scheduler.time_shift(mu, 1.0, sigmas)

    @torch.no_grad()
    def sample(self, text: Mapping[str, Tensor], size: tuple[int, int], steps: int, seed: int) -> Image.Image:
        pipeline = self._pipeline
        pipeline.set_progress_bar_config(disable=True)
        device, dtype = pipeline.transformer.device, pipeline.transformer.dtype
        pipeline.vae.to(device)  # the pipeline takes its first part's device for its own
        packed = pipeline(
            prompt_embeds=text["prompt"][None].to(device, dtype),
            pooled_prompt_embeds=text["pooled"][None].to(device, dtype),
            width=size[0],
            height=size[1],
            num_inference_steps=steps,
            guidance_scale=_SAMPLE_GUIDANCE,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images
        picture = self._decoded(packed.float(), size)
        pipeline.vae.to("cpu")
        return picture

    def _decoded(self, packed: Tensor, size: tuple[int, int]) -> Image.Image:
        pipeline, vae = self._pipeline, self._pipeline.vae
        latents = FluxPipeline._unpack_latents(packed, size[1], size[0], pipeline.vae_scale_factor)
        pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]

    def save_lora(self, folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        FluxPipeline.save_lora_weights(folder, weights, transformer_lora_adapter_metadata=config)

    def load_lora(self, folder: Path) -> dict[str, Tensor]:
        weights = load_file(folder / LORA_WEIGHT_NAME_SAFE)
        return {name.removeprefix(f"{FluxPipeline.transformer_name}."): tensor for name, tensor in weights.items()}

    def save_model(self, folder: Path) -> None:
        self._pipeline.transformer.save_pretrained(folder)

    def load_model(self, folder: Path) -> None:
        transformer = self._pipeline.transformer
        saved = type(transformer).from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
        transformer.load_state_dict(saved.state_dict())


def _pixel_multiple(folder: Path) -> int:
    """The autoencoder's factor, and twice that, because latents are packed two by two."""
    return 2 ** len(read_config(folder / "vae")["block_out_channels"])


ROW = TrainRow(
    key="flux1",
    text_tokens=512,
    pipeline_class=FluxPipeline.__name__,
    encoder_parts=("vae", *_TEXT_PARTS),
    pixel_multiple=_pixel_multiple,
    open_encoders=FluxEncoders.open,
    open_denoiser=FluxDenoiser.open,
)
