"""What the trainer needs of a model family: one row, and two classes that know its pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from lowtide import families
from lowtide.errors import ConfigError


class Encoders(ABC):
    """The parts of a pipeline that turn pictures and captions into what is trained on. Needed for the cache only."""

    @abstractmethod
    def latents(self, pixels: Tensor) -> Tensor:
        """(1, 3, height, width) in −1 … 1 to normalised latents (channels, height, width), float32 on the CPU."""

    @abstractmethod
    def text(self, caption: str) -> dict[str, Tensor]:
        """Named embeddings of one caption, without a batch dimension, on the CPU."""


class Denoiser(ABC):
    """The part of a pipeline that is trained.

    model: the network itself: adapters are put on it, its blocks are checkpointed.
    """

    model: nn.Module

    @abstractmethod
    def velocity(self, noisy: Tensor, sigmas: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        """The model's velocity (noise − picture) at ``noisy`` latents (batch, channels, height, width).

        sigmas: (batch,), the share of noise, 0 … 1. text: the embeddings with a batch dimension.
        """

    @abstractmethod
    def arguments(self, noisy: Tensor, sigmas: Tensor, text: Mapping[str, Tensor]) -> dict[str, Any]:
        """Keyword arguments of ``model.forward`` for the same call."""

    @abstractmethod
    def shift(self, sigmas: Tensor, latents: Tensor) -> Tensor:
        """Sigmas moved to where this family puts its noise at this picture size."""

    @abstractmethod
    def sample(self, text: Mapping[str, Tensor], size: tuple[int, int], steps: int, seed: int) -> Image.Image:
        """A picture of (width, height) for one caption's embeddings."""

    @abstractmethod
    def save_lora(self, folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Write LoRA weights as a stock pipeline's ``load_lora_weights`` reads them.

        weights: by module path in ``model``. config: of the PEFT adapter.
        """

    @abstractmethod
    def tokens(self, size: tuple[int, int], text_tokens: int) -> int:
        """That a block has for a picture of (width, height), the caption's among them where blocks see both."""

    @abstractmethod
    def load_lora(self, folder: Path) -> dict[str, Tensor]:
        """The weights that ``save_lora`` wrote, by module path in ``model``."""

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write the whole model as its class's ``from_pretrained`` reads it."""

    @abstractmethod
    def load_model(self, folder: Path) -> None:
        """Put back the weights that ``save_model`` wrote, exactly."""


@dataclass(frozen=True)
class TrainRow:
    """One family that can be trained.

    text_tokens: of the longest caption. encoder_parts: sub-folders of a pipeline that the cache depends on.
    pipeline_class: name of the class whose pipelines it trains. pixel_multiple: for a pipeline folder, what picture
    sides must be multiples of. open_*: load from a pipeline folder, on a device, in the base's precision.
    """

    key: str
    text_tokens: int
    pipeline_class: str
    encoder_parts: tuple[str, ...]
    pixel_multiple: Callable[[Path], int]
    open_encoders: Callable[[Path, torch.device, torch.dtype, int], Encoders]
    open_denoiser: Callable[[Path, torch.device, torch.dtype], Denoiser]

    def tokens_of(self, wanted: int | None) -> int:
        """Of captions, in a run. wanted: by the key ``tokenizer_max_length``. Raises ConfigError for too many."""
        if wanted is not None and wanted > self.text_tokens:
            raise ConfigError(
                f"tokenizer_max_length: {wanted} is not allowed; allowed for {self.key}: 1 to {self.text_tokens}."
            )
        return self.text_tokens if wanted is None else wanted

    @property
    def lora_targets(self) -> str:
        """Regular expression over module paths of the model: where a LoRA goes."""
        targets = families.find(self.key).lora_targets
        assert targets is not None, f"{self.key} is trained, and its row says nothing of a LoRA"
        return targets
