"""``lowtide plan``: say the VRAM, get the fastest schedule; from shapes, with no GPU and no weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.options import AsJson, Sizes, Target, sizes_of
from lowtide.cli.output import count_in_words, progress, say, show, show_json, working
from lowtide.errors import ConfigError
from lowtide.keys import AUTO
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.measure.cards import Card
    from lowtide.measure.planning import Planned

_CARD_WITHOUT_ONE = "RTX 4090"
_RANK = 16

Budget = Annotated[
    str,
    typer.Option(metavar="SIZE", help="What PyTorch may reserve, as in 22GiB. auto: what the card has to give."),
]
Resolution = Annotated[str | None, typer.Option(metavar="N|WxH", help="Of pictures or frames, in pixels.")]
Frames = Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a video.")]
Batch = Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples in a step.")]
Rank = Annotated[
    int | None, typer.Option("--lora-rank", metavar="N", min=1, help="Of the LoRA that is trained. Default: 16.")
]
Full = Annotated[bool, typer.Option("--full", help="All weights are trained, instead of a LoRA.")]
Optimizer = Annotated[
    str,
    typer.Option(metavar="NAME", help="Whose states lie on the device: adamw, adamw-8bit, lion, sgd-momentum, sgd …"),
]
Ema = Annotated[bool, typer.Option("--ema", help="A mean of the trained weights lies on the device, too.")]
Accumulation = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Backwards before an update. With more than one, all gradients lie there when backward begins.",
    ),
]
NoAutocast = Annotated[
    bool,
    typer.Option("--no-autocast", help="All in bf16, what is trained too, instead of float32 under bf16 autocast."),
]
CardName = Annotated[
    str | None,
    typer.Option(
        "--card",
        metavar="NAME",
        help="Whose speed, by name or by figures. Default: this machine's, or RTX 4090.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="CPU memory for what moves. Default: 60 % of this machine's. 0: nothing moves. none: no limit.",
    ),
]
Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the plan; `lowtide.attach(schedule=FILE)` takes it.")
]
NoFits = Annotated[bool, typer.Option("--no-fits", help="Leave out what would just fit: quicker.")]


def plan(
    target: Target,
    budget: Budget = "auto",
    resolution: Resolution = None,
    frames: Frames = None,
    batch: Batch = None,
    set_: Sizes = None,
    lora_rank: Rank = None,
    full: Full = False,
    optimizer: Optimizer = "adamw",
    ema: Ema = False,
    accumulation: Accumulation = 1,
    no_autocast: NoAutocast = False,
    card: CardName = None,
    host_memory: HostMemory = None,
    save: Save = None,
    no_fits: NoFits = False,
    json: AsJson = False,
) -> None:
    """Choose each block's treatment for a VRAM budget, and explain it. Exit code 1 where nothing fits."""
    with working(), progress() as told:
        from lowtide.measure.planning import Wish, plan_for
        from lowtide.plan.saved_plan import check_place

        if save is not None:
            check_place(save)
        chosen = _card(card)
        sizes = _sizes(resolution, frames, batch, set_)
        wish = Wish(
            target,
            _budget(budget, chosen),
            chosen,
            sizes,
            _rank(lora_rank, full),
            _host(host_memory),
            _optimizer(optimizer),
            ema,
            accumulation,
            not no_autocast,
        )
        planned = plan_for(wish, fits=not no_fits, told=told)
    if json:
        show_json(planned.as_dict())
    else:
        show(*_in_words(planned, host_memory is None))
    if save is not None and planned.plan is not None:
        _write(save, planned)  # last: if the disk is full now, the answer has been shown
    if planned.plan is None:
        raise typer.Exit(1)


def _rank(lora_rank: int | None, full: bool) -> int | None:
    if full and lora_rank is not None:
        raise ConfigError("--lora-rank is of a LoRA, and --full trains all weights: leave out one of them")
    return None if full else lora_rank or _RANK


def _optimizer(name: str) -> str:
    from lowtide.keys import Choice
    from lowtide.measure.residents import STATE_BYTES

    try:
        return Choice(tuple(STATE_BYTES))(name)
    except ConfigError as error:
        raise ConfigError(f"--optimizer: {error}") from None


def _card(name: str | None) -> "Card":
    import torch

    from lowtide.measure.cards import find_card

    if name is not None:
        return find_card(name)
    if not torch.cuda.is_available():
        return find_card(_CARD_WITHOUT_ONE)
    return find_card(torch.cuda.get_device_name())


def _budget(text: str, card: "Card") -> int:
    from lowtide.measure.device import available_bytes, budget_within

    size_bytes = _amount("--budget", text, AUTO)
    if size_bytes is not None:
        return size_bytes
    free = available_bytes()
    return budget_within(card.memory_bytes if free is None else free)


def _amount(option: str, text: str, word: str) -> int | None:
    """Bytes; None for the word. ConfigError where somebody forgot the unit, too."""
    from lowtide.keys import Budget as Amount

    try:
        size = Amount(word)(text)
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from None
    return size if isinstance(size, int) else None


def _host(text: str | None) -> int | None:
    if text is not None:
        return 0 if text.strip() == "0" else _amount("--host-memory", text, "none")
    from lowtide.runtime.host_memory import share_of_host_bytes

    return share_of_host_bytes()


def _sizes(resolution: str | None, frames: int | None, batch: int | None, others: list[str] | None) -> dict[str, int]:
    named = {"FR": frames, "B": batch, **_sides(resolution)}
    sizes = {name: value for name, value in named.items() if value is not None}
    more = sizes_of(others or [])
    if twice := sorted(sizes.keys() & more.keys()):
        raise ConfigError(f"{', '.join(twice)} is given twice: by --set and by an option of its own")
    return sizes | more


def _sides(resolution: str | None) -> dict[str, int]:
    if resolution is None:
        return {}
    match = re.fullmatch(r"(\d+)(?:[x×](\d+))?", resolution.strip().lower())
    if match is None or not int(match[1]) or not int(match[2] or 1):
        raise ConfigError(f"--resolution {resolution!r} is not allowed; expected pixels, as in 1024 or 832x480")
    return {"W": int(match[1]), "H": int(match[2] or match[1])}


def _write(path: Path, planned: "Planned") -> None:
    from lowtide.plan.saved_plan import save_plan

    assert planned.plan is not None
    save_plan(path, planned.plan, planned.conditions)
    added = "an update after each backward" if planned.wish.accumulation == 1 else "gradients that add up"
    made = f"{planned.trained_text}, {planned.wish.precision}, the sizes above, and {added}"
    say(f"The plan is in {path}. It is for {made}: with more of any, the peak is higher.")


def _in_words(planned: "Planned", usual_host_limit: bool) -> Iterator[str]:
    from lowtide.plan.explain import in_words, ms_in_words

    yield _heading(planned)
    yield _residents(planned)
    yield _host_limit(planned, usual_host_limit)
    yield from planned.warnings
    if planned.plan is not None:
        yield f"\n{in_words(planned.plan)}"
        yield _RESERVED
        yield from _bound(planned)
    if planned.refusal is not None:
        yield f"\n{planned.refusal[:1].upper()}{planned.refusal[1:]}."
        yield "What can help:"
    yield from (f"  {hint}" for hint in planned.hints)
    if planned.fits:
        yield f"\nWhat would just fit in {format_bytes(planned.wish.budget_bytes)}, each with all else unchanged:"
    for fit in planned.fits:
        least = "at least " if fit.at_least else ""
        yield (
            f"  {fit.name}: {least}{fit.largest} (asked: {fit.asked}), {ms_in_words(fit.step_ms)} a step"
            if fit.step_ms is not None
            else f"  {fit.name}: none"
        )


def _heading(planned: "Planned") -> str:
    from lowtide.measure.allowed import SIZE_WORDS

    told = {name: planned.sizes[name] for name in SIZE_WORDS if name in planned.sizes}
    sizes = ", ".join(f"{SIZE_WORDS[name]} {value}" for name, value in told.items())
    trained = planned.trained_text
    if planned.wish.rank is not None:
        trained += f" ({count_in_words(planned.trained)})"
    return (
        f"{planned.label}, {count_in_words(planned.parameters)} parameters; {sizes}; trained: {trained}; times as on "
        f"{planned.wish.card.name}"
    )


_RESERVED = (
    "Peaks hold with PYTORCH_ALLOC_CONF=expandable_segments:True; "
    "without it leave a tenth to a fifth of the budget free."
)


_UNTIL_THEN = "activations have their room until then (--accumulation 1)"


def _host_limit(planned: "Planned", usual: bool) -> str:
    from lowtide.runtime.host_memory import SHARE_OF_MACHINE

    limit = planned.wish.host_limit_bytes
    if limit is None:
        return "CPU memory for what moves: no limit."
    share = f"{SHARE_OF_MACHINE:.0%} of this machine's, whatever the card; --host-memory sets it"
    return f"CPU memory for what moves: up to {format_bytes(limit)}" + (f" ({share})." if usual else ".")


def _bound(planned: "Planned") -> Iterator[str]:
    from lowtide.plan.explain import ms_in_words

    if planned.without_limit is not None and planned.wish.host_limit_bytes is not None:
        made = planned.without_limit.prediction
        yield (
            f"CPU memory binds this plan: with {format_bytes(made.cpu_bytes)} of it instead of "
            f"{format_bytes(planned.wish.host_limit_bytes)} a step would take {ms_in_words(made.step_ms)}."
        )


def _residents(planned: "Planned") -> str:
    late, wish = planned.late_gradients_bytes if planned.wish.rank is None else 0, planned.wish
    parts: dict[str, Any] = vars(planned.residents)
    parts = parts | {"gradients_bytes": parts["gradients_bytes"] - late}
    listed = ", ".join(f"{name.removesuffix('_bytes')} {format_bytes(size)}" for name, size in parts.items() if size)
    told = [f"There throughout: {format_bytes(planned.residents.total_bytes - late)} ({listed})."]
    if late:
        told.append(f"{format_bytes(late)} of gradients come as backward makes them, block by block: {_UNTIL_THEN}.")
    elif wish.rank is None:
        told.append(f"Gradients add up over {wish.accumulation} backwards.")
    if wish.rank is None and planned.update_bytes:
        told.append(f"An update by {wish.optimizer} takes {format_bytes(planned.update_bytes)} more for a moment.")
    return " ".join(told)
