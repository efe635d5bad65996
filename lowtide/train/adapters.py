"""What is trained, a LoRA or every weight: put on the model, saved by clean names, and put back exactly."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from lowtide.errors import ConfigError
from lowtide.train.families.base import Denoiser

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EXAMPLES = 3


class Trained(ABC):
    """The part of a denoiser that is trained, in float32."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.denoiser.model.parameters() if parameter.requires_grad]

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the weights into ``folder`` as stock diffusers reads them."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Put back what ``save`` wrote. Raises ConfigError unless every tensor has its place, and every place one."""


class Lora(Trained):
    """A LoRA on a frozen model: Hu et al., arXiv:2106.09685.

    targets: regular expression over module paths. alpha: None is the rank.
    Raises ConfigError where no module of the model fits ``targets``.
    """

    def __init__(self, denoiser: Denoiser, targets: str, rank: int, alpha: float | None) -> None:
        super().__init__(denoiser)
        model: Any = denoiser.model
        self._config = LoraConfig(r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=targets)  # type: ignore[arg-type]
        model.requires_grad_(False)
        try:
            model.add_adapter(self._config)
        except ValueError as error:
            raise ConfigError(f"no place for a LoRA in {type(model).__name__}: {error}") from error
        for parameter in self.parameters:
            parameter.data = parameter.data.float()

    def save(self, folder: Path) -> None:
        self.denoiser.save_lora(folder, lora_weights(self.denoiser.model), self._config.to_dict())

    def load(self, folder: Path) -> None:
        set_lora_weights(self.denoiser.model, self.denoiser.load_lora(folder))


class Everything(Trained):
    """Every weight of the model."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__(denoiser)
        denoiser.model.requires_grad_(True)
        denoiser.model.float()

    def save(self, folder: Path) -> None:
        self.denoiser.save_model(folder)

    def load(self, folder: Path) -> None:
        self.denoiser.load_model(folder)


def lora_weights(model: nn.Module) -> dict[str, Tensor]:
    """A LoRA's weights by clean module path, on the CPU."""
    return {clean_name(name): tensor.detach().cpu() for name, tensor in get_peft_model_state_dict(model).items()}


def set_lora_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put back what ``lora_weights`` gave. Raises ConfigError, with examples, unless names and shapes are the same."""
    own = get_peft_model_state_dict(model)
    names = {clean_name(name): name for name in own}
    _check_names(names, weights)
    _check_shapes({clean: own[name] for clean, name in names.items()}, weights)
    set_peft_model_state_dict(model, {names[name]: tensor for name, tensor in weights.items()})


def clean_name(name: str) -> str:
    """A parameter's name without the parts that compile, DDP, FSDP and checkpoint wrappers put into it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def _check_names(expected: Iterable[str], given: Iterable[str]) -> None:
    wanted, there = set(expected), set(given)
    if wanted != there:
        raise ConfigError(
            f"{len(wanted & there)} of the {len(wanted)} tensors that are trained are in the file. "
            f"Only in the model: {_some(wanted - there)}. Only in the file: {_some(there - wanted)}"
        )


def _check_shapes(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if tensor.shape != given[name].shape:
            raise ConfigError(
                f"{name} has the shape {list(given[name].shape)} in the file and {list(tensor.shape)} in the model. "
                "Was it trained with another lora_rank?"
            )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:_EXAMPLES]) or "none"
