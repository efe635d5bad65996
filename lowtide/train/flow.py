"""Flow matching: the training loss, and the same loss on a batch that never changes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.train.families.base import Denoiser

_FIXED_SEED = 20240229


@dataclass(frozen=True)
class Batch:
    """latents: (batch, channels, height, width). text: named embeddings with a batch dimension."""

    latents: Tensor
    text: Mapping[str, Tensor]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.latents.to(device), {name: tensor.to(device) for name, tensor in self.text.items()})


@dataclass(frozen=True)
class Noised:
    """A batch on its way between picture and noise. sigmas: (batch,), the share of noise."""

    latents: Tensor
    sigmas: Tensor
    target: Tensor


def add_noise(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Noised:
    """On the straight line from picture to noise, at sigma; the target is the line's direction, noise − picture.

    Rectified flow: Liu et al., arXiv:2209.03003; Lipman et al., arXiv:2210.02747.
    """
    share = sigmas.view(-1, *[1] * (latents.dim() - 1))
    return Noised((1 - share) * latents + share * noise, sigmas, noise - latents)


def random_noise(denoiser: Denoiser, latents: Tensor, generator: torch.Generator) -> Noised:
    """Noise and sigmas from ``generator`` (on the CPU); sigmas are logit-normal, then shifted as the family does.

    Logit-normal sampling: Esser et al., arXiv:2403.03206.
    """
    noise = torch.randn(latents.shape, generator=generator).to(latents)
    sigmas = torch.sigmoid(torch.randn(len(latents), generator=generator)).to(latents)
    return add_noise(latents, noise, denoiser.shift(sigmas, latents))


def loss_of(denoiser: Denoiser, noised: Noised, text: Mapping[str, Tensor]) -> Tensor:
    """Mean square error of the velocity, in float32."""
    velocity = denoiser.velocity(noised.latents, noised.sigmas, text)
    return (velocity.float() - noised.target.float()).square().mean()


@torch.no_grad()
def fixed_loss(denoiser: Denoiser, batches: list[Batch]) -> float:
    """The loss on these batches with noise and sigmas that are the same at every call: what shows learning.

    The sigmas are spread evenly over 0 … 1. The model is in eval mode meanwhile; no random state is touched.
    """
    generator = torch.Generator().manual_seed(_FIXED_SEED)
    count = sum(len(batch.latents) for batch in batches)
    spread = (torch.randperm(count, generator=generator) + 0.5) / count
    was_training = denoiser.model.training
    denoiser.model.eval()
    total = 0.0
    for batch in batches:
        sigmas, spread = spread[: len(batch.latents)], spread[len(batch.latents) :]
        noise = torch.randn(batch.latents.shape, generator=generator).to(batch.latents)
        noised = add_noise(batch.latents, noise, sigmas.to(batch.latents))
        total += len(batch.latents) * loss_of(denoiser, noised, batch.text).item()
    denoiser.model.train(was_training)
    return total / count
