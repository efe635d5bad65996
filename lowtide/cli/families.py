"""``lowtide families``: the models that lowtide has a row for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from lowtide.cli.options import AsJson
from lowtide.cli.output import count_in_words, show, show_json, working
from lowtide.controls import BACKENDS

_Aliases = Annotated[bool, typer.Option("--aliases", help="Show the further names that a family is known by.")]


def families(aliases: _Aliases = False, json: AsJson = False) -> None:
    """List the model families that lowtide knows: their block stacks, and the backends that they can run."""
    with working():
        from lowtide.measure.catalogue import describe_families

        rows = describe_families()
    if json:
        show_json({"families": list(rows)})
    else:
        show(
            _table(rows, aliases),
            f"\nBackends: {', '.join(BACKENDS)}; all where the table names none.",
            "Any other model works too: `lowtide inspect MODEL_DIR` shows the block stacks found in it.",
        )


def _table(rows: Sequence[dict[str, Any]], aliases: bool) -> Table:
    """Backends have a column only where some family cannot run all of them."""
    all_run_all = all(set(row["scopes"]) == set(BACKENDS) for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("family", no_wrap=True)
    table.add_column("name", max_width=16)
    if aliases:
        table.add_column("also", overflow="fold")
    else:
        table.add_column("blocks", overflow="fold")
        table.add_column("size", justify="right", no_wrap=True)
    if not all_run_all:
        table.add_column("backends")
    for row in rows:
        middle = [", ".join(row["aliases"])] if aliases else [_stacks(row), count_in_words(row["parameters"])]
        cells = [row["key"], row["title"], *middle]
        table.add_row(*cells, *([] if all_run_all else [_backends(row["scopes"])]))
    return table


def _backends(scopes: Sequence[str]) -> str:
    return "all" if set(scopes) == set(BACKENDS) else "\n".join(scopes)


def _stacks(row: Mapping[str, Any]) -> str:
    return "\n".join(f"{stack['depth']} {stack['path']}" for stack in row["stacks"])
