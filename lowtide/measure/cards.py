"""What graphics cards do in practice, for forecasts where there is none to measure on.

flops_per_s: of bf16 transformer blocks in eager mode, attention included; about half to two thirds of a data sheet's
dense figure. memory_bytes_per_s: data sheet. link: pinned copies over the card's PCIe generation and lanes. A measured
figure is always better: ``lowtide plan`` says which it used.
"""

import difflib
import re
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.keys import Budget
from lowtide.plan.costs import LinkRates

_GEN3, _GEN4, _GEN5 = (LinkRates(rate, rate) for rate in (11.5, 23.5, 51.0))
_GEN4_X8, _GEN5_X8 = (LinkRates(rate, rate) for rate in (11.5, 25.0))


@dataclass(frozen=True)
class Card:
    """memory_bytes: of the device, all of it. See the module for the rates. bf16: whether it computes in bfloat16, or
    PyTorch does with other means, many times slower."""

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    link: LinkRates
    bf16: bool = True


_GIB = 2**30
CARDS = (
    Card("RTX 3060 12GB", 12 * _GIB, 25e12, 360e9, _GEN4),
    Card("RTX 3090", 24 * _GIB, 70e12, 936e9, _GEN4),
    Card("RTX 4060", 8 * _GIB, 30e12, 272e9, _GEN4_X8),
    Card("RTX 4060 Ti 16GB", 16 * _GIB, 44e12, 288e9, _GEN4_X8),
    Card("RTX 4070", 12 * _GIB, 58e12, 504e9, _GEN4),
    Card("RTX 4070 Ti SUPER", 16 * _GIB, 88e12, 672e9, _GEN4),
    Card("RTX 4080", 16 * _GIB, 97e12, 717e9, _GEN4),
    Card("RTX 4090", 24 * _GIB, 165e12, 1008e9, _GEN4),
    Card("RTX 5060 Ti 16GB", 16 * _GIB, 47e12, 448e9, _GEN5_X8),
    Card("RTX 5070 Ti", 16 * _GIB, 88e12, 896e9, _GEN5),
    Card("RTX 5080", 16 * _GIB, 112e12, 960e9, _GEN5),
    Card("RTX 5090", 32 * _GIB, 210e12, 1792e9, _GEN5),
    Card("RTX PRO 6000", 96 * _GIB, 250e12, 1792e9, _GEN5),
    Card("T4", 16 * _GIB, 25e12, 300e9, _GEN3, bf16=False),
    Card("V100", 32 * _GIB, 60e12, 900e9, _GEN3, bf16=False),
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

_FIGURES = ("memory", "tflops", "gb_per_s", "link")

HOST_US = 14.0
"""What one operator costs the host that dispatches it, Python included. Fitted to steps that the host bound in
benchmarks/results/family.jsonl (SDXL, Kolors, SD 1.x, PixArt, Lumina2), whose host is a slow one: on another, such
models may take much less."""

_MAKERS = {"nvidia", "geforce", "tesla", "quadro", "rtx", "gpu"}
_FORMS = {
    "sxm2",
    "sxm4",
    "sxm5",
    "pcie",
    "hbm2",
    "hbm2e",
    "hbm3",
    "hbm3e",
    "blackwell",
    "workstation",
    "server",
    "edition",
}
_MEMORY = re.compile(r"(\d+)gi?b")


def find_card(name: str) -> Card:
    """By name, exactly: only case, dashes, the maker's words and those for how it is built in are ignored. Or by its
    figures: ``memory=24GiB,tflops=70,gb_per_s=936,link=23.5`` (the rates as the module says; the link in GiB/s).

    The memory need be named only where there is a choice. Raises ConfigError: names those that may be meant.
    """
    if "=" in name:
        return _by_figures(name)
    words, memory_gib = _words(name)
    alike = [card for card in CARDS if _words(card.name)[0] == words]
    found = [card for card in alike if memory_gib in (None, card.memory_bytes // _GIB)]
    if len(found) == 1:
        return found[0]
    near = [card.name for card in alike or _near(words)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"unknown card {name!r}.{hint} Known: {', '.join(card.name for card in CARDS)}")


def _by_figures(text: str) -> Card:
    parts = [part.replace(" ", "").partition("=") for part in text.lower().split(",")]
    given = {name: value for name, _, value in parts}
    try:
        if sorted(name for name, _, _ in parts) != sorted(_FIGURES):
            raise ConfigError("each of them once")
        memory_bytes = Budget()(given["memory"])
        tflops, gb_per_s, link = (float(given[name]) for name in _FIGURES[1:])
        if not isinstance(memory_bytes, int) or not all(1e-3 < figure < 1e6 for figure in (tflops, gb_per_s, link)):
            raise ConfigError("no card is like that")
    except ValueError as error:
        example = "memory=24GiB,tflops=70,gb_per_s=936,link=23.5"
        raise ConfigError(f"card {text!r}: expected {', '.join(_FIGURES)}, as in {example} ({error})") from error
    return Card(text, memory_bytes, tflops * 1e12, gb_per_s * 1e9, LinkRates(link, link))


def _words(name: str) -> tuple[str, int | None]:
    """What tells a card from others, and its memory in GiB, if the name says it."""
    text = re.sub(r"(\d+)\s+(gi?b)\b", r"\1\2", name.lower())
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=\d)(ti|super)\b", r" \1", text))
    memory = [int(match[1]) for word in words if (match := _MEMORY.fullmatch(word))]
    told = [word for word in words if word not in _MAKERS | _FORMS and not _MEMORY.fullmatch(word)]
    return "".join(told).removeprefix("rtx"), memory[0] if memory else None


def _near(words: str) -> list[Card]:
    known = {_words(card.name)[0]: card for card in CARDS}
    within = [card for key, card in known.items() if words and (words in key or key in words)]
    return within or [known[key] for key in difflib.get_close_matches(words, known, n=3, cutoff=0.4)]
