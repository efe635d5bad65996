"""``lowtide.attach``: what people give it, checked, and turned into controls or a schedule."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lowtide.auto.handle import AutoHandle
from lowtide.checkpoint_wrappers import any_wrapper, wrapped
from lowtide.controls import CheckpointConfig
from lowtide.errors import ConfigError
from lowtide.handle import OWN_IS_ON, Handle, attach_as, has_own_on, rows_for
from lowtide.keys import is_unset
from lowtide.plan.answer import Plan
from lowtide.plan.saved_plan import load_plan
from lowtide.plan.schedule import MAX_SIZES, MIN_BYTES, Schedule
from lowtide.runtime.resolve import resolve

_log = logging.getLogger("lowtide")
_PREFIX = "gradient_checkpointing"
_DENOISERS = ("transformer", "unet", "prior", "decoder")
"""What pipelines call the model that is trained."""


class _NotGiven(str):
    """A default value that is told from the same value when somebody gives it."""


_TORCH = _NotGiven("torch")


def attach(
    model: nn.Module,
    *,
    backend: str | None = _TORCH,
    interval: int | None = None,
    segment_stride: int | None = None,
    offload_attention: bool = False,
    offload_pin_memory_max_buckets: int = MAX_SIZES,
    offload_min_bytes: int = MIN_BYTES,
    family: str | None = None,
    schedule: Schedule | str | Path | None = None,
    vram_budget: int | str | None = None,
    **unknown: Any,
) -> Handle | AutoHandle:
    """Recompute activations of ``model``'s blocks in backward, or let them wait in CPU memory, with exactly the
    gradients of a plain run.

    model: any module that has block stacks: a diffusers or transformers model, also inside DDP, PEFT or torch.compile
        wrappers. Known classes use their family's row; for others the stacks are found by structure.
    backend: ``"torch"`` recomputes whole blocks, ``"torch-ffn"`` feed-forward sides, ``"torch-selective"`` whole blocks
        but for their attention kernels; ``"unsloth"``, ``"unsloth-ffn"``, ``"unsloth-selective"`` the same, and what
        they must hold waits in CPU memory; ``"auto"``: see vram_budget; None: nothing is recomputed.
    interval, segment_stride: see docs/controls.md.
    offload_attention: what attention sides save waits in CPU memory, where they are not recomputed.
    offload_pin_memory_max_buckets: distinct sizes of pinned CPU buffers; 0: ordinary CPU memory.
    offload_min_bytes: smaller tensors stay on the device.
    family: a key, title or alias of ``lowtide families``; default: by the model's class.
    schedule: an explicit treatment of every block (see lowtide.plan.schedule), or the file of a saved plan, instead of
        backend, interval, segment_stride, offload_attention and vram_budget.
    vram_budget: for ``backend="auto"``, which chooses each block's treatment in the first steps: what PyTorch may
        reserve of the device's memory, in bytes or as text (``"16GiB"``); ``"auto"`` or None: what there is.

    Raises ConfigError for a wrong value, a model that is attached already, or offload without an accelerator;
    UnsupportedError where the model cannot run the scope. Activation checkpointing with non-reentrant semantics: Chen
    et al., arXiv:1604.06174. Offload beside computation: Rhu et al. (vDNN), arXiv:1602.08124.
    """
    if unknown:
        _refuse(unknown)
    _check_model(model)
    if isinstance(schedule, str) and is_unset(schedule):
        schedule = None
    if schedule is not None:
        _check_exclusive(backend, interval, segment_stride, offload_attention, vram_budget)
        backend = None
    config = CheckpointConfig.for_attach(
        backend,
        interval,
        segment_stride,
        offload_attention,
        offload_pin_memory_max_buckets,
        offload_min_bytes,
        vram_budget,
    )
    config, schedule = _unless_wrapped(model, family, config, schedule)
    if config.is_auto:
        handle: Handle | AutoHandle = AutoHandle(model, config, family)
    else:
        plan = _plan_of(schedule)
        own = _schedule_of(schedule) if plan is None else plan.schedule
        handle = attach_as(model, config, own, family, plan=plan)
    if has_own_on(model.modules()):
        _log.warning(OWN_IS_ON)
    return handle


def _unless_wrapped(
    model: nn.Module, family: str | None, config: CheckpointConfig, schedule: Any
) -> tuple[CheckpointConfig, Any]:
    """The same, or nothing to do where torch's wrappers recompute blocks already: two would recompute them twice."""
    if not any_wrapper(model):
        return config, schedule
    root, rows = rows_for(model, family)
    paths = wrapped(root, resolve(root, rows))
    if not paths:
        return config, schedule
    _log.info(
        "activation checkpointing is off: %d parts of the model (%s the first) are in torch's CheckpointWrapper "
        "already, which FSDP's activation checkpointing puts there",
        len(paths),
        paths[0] or type(root).__name__,
    )
    return CheckpointConfig.for_attach(None), None


def _check_model(model: Any) -> None:
    """Raises ConfigError for what is no module: a pipeline is often given for the part of it that is trained."""
    if isinstance(model, nn.Module):
        return
    parts = [name for name in _DENOISERS if isinstance(getattr(model, name, None), nn.Module)]
    advice = f": give it the part that is trained, its .{parts[0]}" if parts else ""
    raise ConfigError(f"attach() takes a torch.nn.Module, and this is a {type(model).__name__}{advice}")


def _plan_of(given: Any) -> Plan | None:
    """The plan in a file."""
    return load_plan(given.strip() if isinstance(given, str) else given).plan if isinstance(given, str | Path) else None


def _schedule_of(given: Any) -> Schedule | None:
    if given is not None and not isinstance(given, Schedule):
        raise ConfigError(
            f"schedule must be a lowtide.plan.schedule.Schedule or the path of a saved plan, not a "
            f"{type(given).__name__}"
        )
    return given


def _check_exclusive(
    backend: str | None,
    interval: int | None,
    segment_stride: int | None,
    offload_attention: bool,
    vram_budget: int | str | None,
) -> None:
    given = {
        "backend": backend is not _TORCH and not is_unset(backend),
        "interval": interval is not None,
        "segment_stride": segment_stride is not None,
        "offload_attention": offload_attention,
        "vram_budget": vram_budget is not None,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(f"`schedule` says by itself what is done with every block: leave {', '.join(wrong)} out.")


def _refuse(unknown: Mapping[str, Any]) -> None:
    """Raises the error for arguments that ``attach`` does not have: the nearest one, or its spelling here."""
    if _PREFIX in unknown:
        raise ConfigError(
            f"attach() has no {_PREFIX!r}: attaching switches recomputation on, and backend=None is the spelling of "
            f"{_PREFIX}=False here."
        )
    names = {key: key.removeprefix(f"{_PREFIX}_") for key in unknown}
    CheckpointConfig(**{names[key]: value for key, value in unknown.items()})  # raises where no key has that name
    given = ", ".join(f"{name!r}, not {key!r}" for key, name in names.items())
    raise ConfigError(f"attach() takes {given}: the longer names are those of configuration files.")
