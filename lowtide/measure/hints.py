"""What can help where no schedule fits in a budget."""

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.measure.cards import CARDS
from lowtide.measure.device import budget_within
from lowtide.measure.residents import ADAMW, STATE_BYTES, Residents
from lowtide.units import format_bytes

_EIGHT_BIT = "adamw-8bit"
_CARDS_NAMED = 3


@dataclass(frozen=True)
class Need:
    """Of a wish that nothing fulfils. trained: weights that get gradients. host_limit_binds: it would fit with more CPU
    memory."""

    budget_bytes: int
    smallest_peak_bytes: int
    residents: Residents
    trained: int
    optimizer: str
    full: bool
    host_limit_binds: bool


def hints(need: Need) -> Iterator[str]:
    """What helps most comes first."""
    there, missing = need.residents, need.smallest_peak_bytes - need.budget_bytes
    if need.host_limit_binds:
        yield "more CPU memory (--host-memory): with enough of it a schedule fits"
    if need.full:
        yield "a LoRA instead of all weights: leave --full out"
        if need.optimizer == ADAMW:
            saved = int(need.trained * (STATE_BYTES[ADAMW] - STATE_BYTES[_EIGHT_BIT]))
            yield f"--optimizer {_EIGHT_BIT}: {format_bytes(saved)} less" + _enough(saved, missing)
    else:
        yield (
            f"quantised base weights, which are not planned for: of {format_bytes(there.weights_bytes)} of weights in "
            "bf16, 8 bits take about half, 4 bits a quarter"
        )
    yield _smaller(need)
    cards = [card.name for card in CARDS if card.bf16 and budget_within(card.memory_bytes) >= need.smallest_peak_bytes]
    if cards:
        yield f"another card, of {format_bytes(need.smallest_peak_bytes)} or more: {', '.join(cards[:_CARDS_NAMED])} …"


def _enough(saved_bytes: int, missing_bytes: int) -> str:
    return (
        ", which is enough" if saved_bytes >= missing_bytes else f", of {format_bytes(missing_bytes)} that are missing"
    )


def _smaller(need: Need) -> str:
    there = need.residents.total_bytes
    text = f"smaller inputs lower only what is beside the {format_bytes(there)} that are there throughout"
    if there >= need.budget_bytes:
        return f"{text}: here they do not help, as that alone is over the budget"
    return f"a smaller batch or resolution, or fewer frames: {text}"
