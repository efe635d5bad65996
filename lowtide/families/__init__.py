"""What is known about model families: one row a family, data only, needs neither torch nor diffusers.

Add a family: a module of rows, and its name in the list here.
"""

from difflib import get_close_matches

from lowtide.errors import ConfigError
from lowtide.families import (
    ace_step,
    anima,
    anyflow,
    auraflow,
    bria,
    chroma,
    cogvideox,
    cogview4,
    cosmos2,
    cosmos3,
    ernie_image,
    flux1,
    flux2,
    flux3,
    hidream,
    hunyuan_image,
    hunyuan_video,
    hunyuan_video_15,
    ideogram4,
    kandinsky5,
    kolors,
    krea2,
    longcat_image,
    ltx2_video,
    ltx_video,
    lumina2,
    minimax_h3,
    mochi,
    omnigen,
    ovis_image,
    pixart,
    prx,
    qwen_image,
    qwen_image_21,
    sana,
    sana_video,
    sd3,
    sd15,
    sdxl,
    stable_cascade,
    wan,
    z_image,
)
from lowtide.families.row import Build, Family, Stack

__all__ = ["Build", "Family", "Stack", "all_families", "by_class", "find", "known", "names_of", "unknown"]

_MODULES = (
    flux1,
    flux2,
    sd3,
    sdxl,
    pixart,
    sana,
    qwen_image,
    lumina2,
    wan,
    ltx_video,
    z_image,
    auraflow,
    chroma,
    bria,
    longcat_image,
    ovis_image,
    ace_step,
    anyflow,
    cogvideox,
    cosmos3,
    hunyuan_video,
    hunyuan_video_15,
    kandinsky5,
    ltx2_video,
    minimax_h3,
    mochi,
    sana_video,
    flux3,
    hidream,
    hunyuan_image,
    ernie_image,
    krea2,
    cogview4,
    prx,
    omnigen,
    ideogram4,
    kolors,
    sd15,
    stable_cascade,
    cosmos2,
    anima,
    qwen_image_21,
)
_FAMILIES = tuple(row for module in _MODULES for row in module.ROWS)


def all_families() -> tuple[Family, ...]:
    """Every row, in the order in which people see them."""
    return _FAMILIES


def find(name: str) -> Family:
    """The family of that key, title or alias; case, space, dot, dash and underscore do not matter.

    Raises ConfigError for an unknown name: says what is near and how to list them.
    """
    family = _table().get(_plain(name))
    if family is None:
        raise ConfigError(unknown(name))
    return family


def known(name: str) -> bool:
    """Whether ``find(name)`` would give a family."""
    return _plain(name) in _table()


def unknown(name: str) -> str:
    """What to tell somebody about a name that is no family's: the nearest ones, and how to list them."""
    table = _table()
    near = dict.fromkeys(table[match].key for match in get_close_matches(_plain(name), table, n=3))
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"unknown family {name!r}. {hint}`lowtide families` lists them"


def by_class(class_name: str) -> Family | None:
    """The first family of a model class, or None. Families that share a class share their stacks."""
    return next((row for row in _FAMILIES if row.class_name == class_name), None)


def names_of(row: Family) -> tuple[str, ...]:
    """Every name that ``find`` takes for a family, as it is written in the row."""
    return (row.key, row.title, *row.aliases)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c not in " .-_")


def _table() -> dict[str, Family]:
    return {_plain(name): row for row in _FAMILIES for name in names_of(row)}
