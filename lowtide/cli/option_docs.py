"""Help texts and documentation tables of a configuration, from the one place where its keys are explained.

``python -m lowtide.cli.option_docs FILE…`` brings the tables in Markdown files up to date: they stand between
``<!-- keys: module.Class -->`` and ``<!-- end of keys -->``.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from lowtide.keys import Keys, key_of

_TABLE = re.compile(r"(<!-- keys: ([\w.]+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)


def help_of(model: type[Keys], field: str) -> str:
    """The explanation of a field as plain text, for ``--help``."""
    return _description(model.model_fields[field]).replace("`", "")


def markdown_table(model: type[Keys]) -> str:
    """A table of every key: its name, what is allowed, its default, its meaning."""
    renamed = any(key_of(name, field) != name for name, field in model.model_fields.items())
    head = ["key", *(["argument"] if renamed else []), "allowed", "default", "meaning"]
    rows = [_cells(name, field, renamed) for name, field in model.model_fields.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def up_to_date(text: str) -> str:
    """A Markdown text with every table between markers made anew."""

    def table(match: re.Match[str]) -> str:
        module, _, name = match[2].rpartition(".")
        return f"{match[1]}{markdown_table(getattr(import_module(module), name))}{match[3]}"

    return _TABLE.sub(table, text)


def _cells(name: str, field: FieldInfo, renamed: bool) -> list[str]:
    argument = [f"`{name}`"] if renamed else []
    cells = [f"`{key_of(name, field)}`", *argument, _allowed(field), _default(field.default), _description(field)]
    return [cell.replace("|", "\\|") for cell in cells]


def _description(field: FieldInfo) -> str:
    return field.description or ""


def _allowed(field: FieldInfo) -> str:
    """What the field's validator says that it takes; for a field without one, its type."""
    validators = [item.func for item in field.metadata if isinstance(item, BeforeValidator)]
    words = [getattr(validator, "allowed", "") for validator in validators]
    kind = field.annotation
    return next((word for word in words if word), kind.__name__ if isinstance(kind, type) else str(kind))


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else f"`{value}`"


def main(paths: Sequence[str]) -> None:
    for path in map(Path, paths):
        path.write_text(up_to_date(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
