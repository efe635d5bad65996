"""What can help where no schedule fits in a budget."""

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.measure.cards import CARDS, Card
from lowtide.measure.device import budget_within
from lowtide.measure.residents import ADAMW, ADAMW_8BIT, ADAMW_FUSED, STATE_BYTES, Residents
from lowtide.units import format_bytes

_CARDS_NAMED = 3


@dataclass(frozen=True)
class Need:
    """Of a wish that nothing fulfils. trained: weights that get gradients. host_limit_binds: it would fit with more CPU
    memory. update_bytes: what an update takes beside the residents. accumulation: backwards before it. card: what times
    are for."""

    budget_bytes: int
    smallest_peak_bytes: int
    residents: Residents
    trained: int
    optimizer: str
    full: bool
    host_limit_binds: bool
    update_bytes: int = 0
    accumulation: int = 1
    card: Card | None = None


def hints(need: Need) -> Iterator[str]:
    """What helps most comes first."""
    there, missing = need.residents, need.smallest_peak_bytes - need.budget_bytes
    if need.card is not None and (most := budget_within(need.card.memory_bytes)) >= need.smallest_peak_bytes:
        yield f"a larger --budget: this card, {need.card.name}, has {format_bytes(most)}"
    if need.host_limit_binds:
        yield "more CPU memory (--host-memory): with enough of it a schedule fits"
    if need.full:
        yield "a LoRA instead of all weights: leave --full out"
        if need.accumulation > 1:
            yield "--accumulation 1, with as many samples in one batch: gradients leave their room to activations then"
        if need.update_bytes:
            yield f"--optimizer {ADAMW_FUSED}: an update takes {format_bytes(need.update_bytes)} less"
        if need.optimizer in (ADAMW, ADAMW_FUSED):
            states = int(there.states_bytes * (1 - STATE_BYTES[ADAMW_8BIT] / STATE_BYTES[ADAMW]))
            saved = states + need.update_bytes
            yield f"--optimizer {ADAMW_8BIT}: {format_bytes(saved)} less" + _enough(saved, missing)
    else:
        yield (
            f"quantised base weights, which are not planned for: of {format_bytes(there.weights_bytes)} of weights in "
            "bf16, 8 bits take about half, 4 bits a quarter"
        )
    if there.total_bytes < need.budget_bytes:
        yield (
            "a smaller batch or resolution, or fewer frames: they lower what is beside the "
            f"{format_bytes(there.total_bytes)} that are there throughout"
        )
    cards = [card.name for card in CARDS if card.bf16 and budget_within(card.memory_bytes) >= need.smallest_peak_bytes]
    if cards:
        yield f"another card, of {format_bytes(need.smallest_peak_bytes)} or more: {', '.join(cards[:_CARDS_NAMED])} …"


def _enough(saved_bytes: int, missing_bytes: int) -> str:
    return (
        ", which is enough" if saved_bytes >= missing_bytes else f", of {format_bytes(missing_bytes)} that are missing"
    )
