"""Builds the model of a family, or loads one from a folder."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lowtide import families
from lowtide.errors import ConfigError
from lowtide.families import Build, Family
from lowtide.measure.inputs import build_inputs, sizes_for

Size = Literal["tiny", "real"]

_INSTALL = "pip install 'lowtide[diffusers]'"
_COMPONENTS = ("transformer", "unet")
_REDRAW_STD = 0.05


@dataclass(frozen=True)
class Target:
    """What a command works on: a model, its family if a row knows its class, and how to name it to people.

    build: the configuration whose inputs fit the model, and over: the sizes in it that this model's configuration
    decides. None and {} for a model of no known family.
    """

    label: str
    model: nn.Module
    family: Family | None
    build: Build | None
    over: dict[str, int]

    def inputs(
        self,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        over: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, Any]:
        """Keyword arguments for the model's forward. Raises ConfigError for a model of no known family."""
        if self.build is None:
            raise ConfigError(
                f"{self.label} is of class {type(self.model).__name__}, which no family describes, so its inputs are "
                "unknown. `lowtide families` lists the families"
            )
        return build_inputs(self.build, dtype, seed, {**self.over, **(over or {})}, device=device)


def build_model(
    family: Family,
    size: Size = "tiny",
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> nn.Module:
    """A model of the family's tiny or real configuration, randomly initialised.

    device: "cpu", or "meta": shapes only, no memory for weights. dtype: of the weights (default float32); modules that
    their class keeps in float32 stay there, as in ``from_pretrained``. The global random state is left alone.
    A tiny model has no zero weights: those that the class initialises to zero (gates, final layers) would hide whole
    stacks from the gradient, so they are drawn from N(0, 0.05).
    Raises ConfigError if the model's library is not installed.
    """
    model_class = import_class(family.class_path)
    config = _configuration(family, size).config
    model = _construct(lambda: model_class(**config), device, seed)
    if size == "tiny":
        _redraw_zeros(model, seed + 1)
    if dtype is not None:
        cast(model, dtype)
    return model.train(family.train_mode)


def load_model(folder: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The denoising model of a folder: a pipeline's (``model_index.json``) transformer or U-Net, or the model itself
    (``config.json`` with ``_class_name``).

    device: "cpu" reads the weights; "meta" reads the configuration only. Returned in eval mode, as diffusers does.
    Raises ConfigError for a folder that is missing, is neither, or cannot be read.
    """
    path = _model_folder(Path(folder).expanduser())
    model_class = _diffusers_class(_read_json(path / "config.json").get("_class_name"), path)
    try:
        if device != "meta":
            return model_class.from_pretrained(str(path), use_safetensors=True, torch_dtype=dtype).to(device)
        config = model_class.load_config(str(path))
        model = _construct(lambda: model_class.from_config(config), device, seed=0).eval()
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load {model_class.__name__} from {path}: {error}") from error
    return model if dtype is None else cast(model, dtype)


def open_target(
    name_or_folder: str | Path,
    size: Size = "tiny",
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    folder_inputs: Size = "tiny",
) -> Target:
    """A family by name, built in that size; or the model in a folder.

    folder_inputs: the inputs of a folder's model have the sizes of this row of its family, but for those that its own
    configuration decides.

    A name wins over a folder of that name: write ``./flux1`` for the folder.
    Raises ConfigError if it is neither, or nothing: names the nearest families, or what a folder must hold.
    """
    text = str(name_or_folder)
    if families.known(text):
        family = families.find(text)
        model = build_model(family, size, device=device, dtype=dtype)
        return Target(family.title, model, family, _configuration(family, size), {})
    if not text.strip():
        raise ConfigError(f"no model is named. {_expected()}")
    if not _is_path(text):
        raise ConfigError(f"{families.unknown(text)}. There is no folder of that name either")
    model = load_model(text, device=device, dtype=dtype)
    family = family_of(model)
    if family is None:
        return Target(text, model, None, None, {})
    return Target(text, model, family, _configuration(family, folder_inputs), sizes_for(family.sizes, config_of(model)))


def is_folder(name_or_folder: str | Path) -> bool:
    """Whether ``open_target`` takes it for a folder."""
    text = str(name_or_folder)
    return not families.known(text) and Path(text).expanduser().is_dir()


def family_of(model: nn.Module) -> Family | None:
    """The family whose class the model is; of several, the one whose real size is nearest."""
    rows = [row for row in families.all_families() if row.class_name == type(model).__name__]
    if not rows:
        return None
    count = sum(parameter.numel() for parameter in model.parameters())
    return min(rows, key=lambda row: abs(row.parameters - count))


def import_class(class_path: str) -> Any:
    """A class by dotted path. Raises ConfigError if its library is not installed: says what to install."""
    module_name, _, name = class_path.rpartition(".")
    library = module_name.partition(".")[0]
    try:
        module = importlib.import_module(module_name)
        return getattr(module, name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name} needs {error.name}, which is not installed. Install it with: {_INSTALL}") from error
    except AttributeError as error:
        raise ConfigError(f"this version of {library} has no {name}. Update it with: {_INSTALL} --upgrade") from error


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Floating-point weights and buffers in ``dtype``, in place; what the class keeps in float32 stays.

    That is what diffusers' ``from_pretrained(torch_dtype=…)`` leaves.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    kept = tuple(getattr(type(model), "_keep_in_fp32_modules", None) or ()) if half else ()
    for name, module in model.named_modules():
        for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_floating_point() and not any(part in kept for part in (*name.split("."), leaf)):
                tensor.data = tensor.data.to(dtype)
    return model


def _configuration(family: Family, size: Size) -> Build:
    if size not in ("tiny", "real"):
        raise ConfigError(f"unknown size {size!r}; allowed: tiny, real")
    return family.tiny if size == "tiny" else family.real


def _construct(make: Callable[[], Any], device: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return make()


def _redraw_zeros(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("bias") and not parameter.is_meta and parameter.numel() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _REDRAW_STD)


def _is_path(text: str) -> bool:
    return Path(text).exists() or len(Path(text).parts) > 1 or text.startswith((".", "/"))


def _model_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"no model folder at {folder}. {_expected()}")
    if not (folder / "model_index.json").is_file():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds neither model_index.json nor config.json. {_expected()}")
        return folder
    index = _read_json(folder / "model_index.json")
    for component in _COMPONENTS:
        if component in index and (folder / component / "config.json").is_file():
            return folder / component
    raise ConfigError(f"the pipeline in {folder} has no {' or '.join(_COMPONENTS)} folder. {_expected()}")


def _expected() -> str:
    return (
        "Expected the name of a family (`lowtide families` lists them), or a folder as diffusers saves it: a pipeline "
        "(model_index.json and a transformer/ or unet/ folder) or one model (config.json with _class_name)"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, holds a {type(content).__name__}")
    return content


def _diffusers_class(class_name: Any, path: Path) -> Any:
    if not isinstance(class_name, str):
        raise ConfigError(f"{path / 'config.json'} has no _class_name, so the model's class is unknown. {_expected()}")
    return import_class(f"diffusers.{class_name}")


def config_of(model: Any) -> Mapping[str, Any]:
    return dict(model.config)
