"""Frozen weights in fewer bits, by the libraries that people train with."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError


def quantise(model: nn.Module, precision: str) -> None:
    """Quantise the linear layers of a frozen model in place.

    Raises ConfigError for an unknown precision, and where the library that it needs is not installed.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown precision {precision!r}; allowed: {', '.join(PRECISIONS)}")
    try:
        PRECISIONS[precision](model)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"precision {precision} needs {error.name}, which is not installed. Install: pip install 'lowtide[quant]'"
        ) from error


def _sdnq(model: nn.Module, **settings: Any) -> None:
    """https://github.com/Disty0/sdnq: weights in int8, dequantised where they are used, backward too."""
    from sdnq.training import sdnq_training_post_load_quant

    sdnq_training_post_load_quant(
        model,
        weights_dtype="int8",
        group_size=-1,
        use_stochastic_rounding=False,
        torch_dtype=torch.bfloat16,
        **settings,
    )


def _torchao(model: nn.Module, config_name: str) -> None:
    """https://github.com/pytorch/ao: weights in float8 with a scale a row."""
    quantization: Any = import_module(
        "torchao.quantization"
    )  # no dependency of ours: it warns wherever it is installed
    config = getattr(quantization, config_name)()
    quantization.quantize_(model, config, filter_fn=_is_large)


def _is_large(module: nn.Module, _: str) -> bool:
    """Linear layers whose sides float8 products can take."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


PRECISIONS: Mapping[str, Callable[[nn.Module], None]] = {
    "bf16": lambda model: None,
    "int8-sdnq": _sdnq,
    "int8-sdnq-hadamard": lambda model: _sdnq(model, use_hadamard=True),
    "fp8-torchao": lambda model: _torchao(model, "Float8DynamicActivationFloat8WeightConfig"),
    "fp8wo-torchao": lambda model: _torchao(model, "Float8WeightOnlyConfig"),
}
