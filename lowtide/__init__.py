"""lowtide: trains diffusion models in the VRAM that you have, and proves what it did.

``lowtide.attach(model)`` recomputes activations in backward instead of keeping them; the names below are loaded when
they are first used, so that importing lowtide imports neither torch nor anything else that is slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.attaching import attach
    from lowtide.controls import CheckpointConfig
    from lowtide.handle import Handle
    from lowtide.offload import offload_activations
    from lowtide.region import checkpoint

__version__ = "0.1.0"
__all__ = ["CheckpointConfig", "Handle", "__version__", "attach", "checkpoint", "offload_activations"]

_HOMES = {
    "CheckpointConfig": "lowtide.controls",
    "Handle": "lowtide.handle",
    "attach": "lowtide.attaching",
    "checkpoint": "lowtide.region",
    "offload_activations": "lowtide.offload",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
