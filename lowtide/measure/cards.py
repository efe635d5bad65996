"""What graphics cards do in practice, for forecasts where there is none to measure on.

flops_per_s: of bf16 transformer blocks in eager mode, attention included; about half to two thirds of a data sheet's
dense figure. memory_bytes_per_s: data sheet. link: pinned copies over the card's PCIe generation. A measured figure is
always better: ``lowtide plan`` says which it used.
"""

import difflib
import re
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.plan.costs import LinkRates

_GEN3, _GEN4, _GEN5 = (LinkRates(rate, rate) for rate in (11.5, 23.5, 51.0))


@dataclass(frozen=True)
class Card:
    """memory_bytes: of the device, all of it. See the module for the rates."""

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    link: LinkRates


_GIB = 2**30
CARDS = (
    Card("RTX 3060 12GB", 12 * _GIB, 25e12, 360e9, _GEN4),
    Card("RTX 3090", 24 * _GIB, 70e12, 936e9, _GEN4),
    Card("RTX 4060 Ti 16GB", 16 * _GIB, 44e12, 288e9, _GEN4),
    Card("RTX 4070 Ti SUPER", 16 * _GIB, 88e12, 672e9, _GEN4),
    Card("RTX 4080", 16 * _GIB, 97e12, 717e9, _GEN4),
    Card("RTX 4090", 24 * _GIB, 165e12, 1008e9, _GEN4),
    Card("RTX 5070 Ti", 16 * _GIB, 88e12, 896e9, _GEN5),
    Card("RTX 5080", 16 * _GIB, 112e12, 960e9, _GEN5),
    Card("RTX 5090", 32 * _GIB, 210e12, 1792e9, _GEN5),
    Card("RTX PRO 6000", 96 * _GIB, 250e12, 1792e9, _GEN5),
    Card("T4", 16 * _GIB, 25e12, 300e9, _GEN3),
    Card("V100", 32 * _GIB, 60e12, 900e9, _GEN3),
    Card("L4", 24 * _GIB, 60e12, 300e9, _GEN4),
    Card("A10G", 24 * _GIB, 55e12, 600e9, _GEN4),
    Card("A6000", 48 * _GIB, 75e12, 768e9, _GEN4),
    Card("L40S", 48 * _GIB, 180e12, 864e9, _GEN4),
    Card("A100 40GB", 40 * _GIB, 180e12, 1555e9, _GEN4),
    Card("A100 80GB", 80 * _GIB, 180e12, 2039e9, _GEN4),
    Card("H100", 80 * _GIB, 430e12, 3350e9, _GEN5),
    Card("H200", 141 * _GIB, 450e12, 4800e9, _GEN5),
    Card("B200", 180 * _GIB, 900e12, 8000e9, _GEN5),
)


def find_card(name: str) -> Card:
    """By name; case, spaces, dashes and the maker's words are ignored. Raises ConfigError: names the nearest."""
    known = {_plain(card.name): card for card in CARDS}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    within = [card for key, card in known.items() if wanted and (key in wanted or wanted in key)]
    if len(within) == 1:
        return within[0]
    near = [known[key].name for key in difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"unknown card {name!r}.{hint} Known: {', '.join(card.name for card in CARDS)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())
