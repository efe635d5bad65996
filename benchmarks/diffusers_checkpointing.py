"""Diffusers' own ``enable_gradient_checkpointing`` on every family: which blocks it leaves, and where it breaks.

One step of each tiny configuration (and each of its variants) as it is and one with it, on the CPU: calls of the row's
blocks are counted, outputs and gradients compared bit by bit.

``python benchmarks/diffusers_checkpointing.py`` writes benchmarks/results/diffusers_checkpointing.json and the table of
docs/families.md; ``--docs`` makes the table from the last result. Takes a minute.
"""

import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowtide import families
from lowtide.bench.provenance import provenance
from lowtide.families import Family
from lowtide.measure.build import build_model
from lowtide.measure.calls import counted_forwards
from lowtide.measure.catalogue import describe_families
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import compare, run_step
from lowtide.runtime.resolve import resolve

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "diffusers_checkpointing.json"
PAGE = ROOT / "docs" / "families.md"
_TABLE = re.compile(r"(<!-- families -->\n).*?(<!-- end of families -->)", re.DOTALL)
_FAILURES = (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError)


def measure(family: Family) -> dict[str, Any]:
    """One family. stacks: by name, blocks in all and those that no backward recomputed. differences: by variant ("" the
    row's usual inputs), how many outputs and gradients are not those of the plain step, where any. error: what was
    raised instead of a step, and where, or None."""
    found: dict[str, Any] = {"family": family.key, "stacks": {}, "differences": {}, "error": None}
    for variant in (None, *family.variants):
        try:
            left, differences = _step_beside_plain(family, variant)
        except _FAILURES as error:
            where = "" if variant is None else f" (with {variant})"
            return found | {"error": f"{type(error).__name__}{where}: {str(error).splitlines()[0]}"}
        if differences:
            found["differences"][variant or ""] = differences
        if variant is None:
            found["stacks"] = left
    return found


def _step_beside_plain(family: Family, variant: str | None) -> tuple[dict[str, Any], int]:
    model: Any = build_model(family)
    inputs = build_inputs(family.tiny, variant=family.variants[variant] if variant else None)
    stacks = resolve(model, family.stacks)
    blocks = [block for stack in stacks for block in stack.blocks]
    with counted_forwards(blocks) as once:
        plain = run_step(model, inputs)
    model.enable_gradient_checkpointing()
    with counted_forwards(blocks) as calls:
        step = run_step(model, inputs)
    left = {
        stack.name: {
            "blocks": len(stack.blocks),
            "left": [name for name, _ in stack.blocks if calls[name] == once[name]],
        }
        for stack in stacks
    }
    return left, len(compare(plain, step))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line a family."""
    results = {row["family"]: row for row in rows}
    lines = ["| family | class | block stacks | diffusers' own checkpointing |", "| --- | --- | --- | --- |"]
    for family in describe_families():
        stacks = ", ".join(f"{stack['depth']} `{stack['path']}`" for stack in family["stacks"])
        verdict = _in_words(results[family["key"]])
        name = f"{family['title']} (`{family['key']}`)"
        lines.append(f"| {name} | `{family['class'].rpartition('.')[2]}` | {stacks} | {verdict} |")
    return "\n".join(lines) + "\n"


def _in_words(row: Mapping[str, Any]) -> str:
    if row["error"] is not None:
        return f"**fails**: {row['error'].partition(':')[0]}"
    stacks = [_left_in_words(name, stack) for name, stack in row["stacks"].items() if stack["left"]]
    words = [f"leaves {', '.join(stacks)}" if stacks else "all blocks"]
    for variant, count in row["differences"].items():
        words.append(f"**other gradients** {f'with {variant}' if variant else ''} ({count} tensors)")
    return "; ".join(words)


def _left_in_words(name: str, stack: Mapping[str, Any]) -> str:
    if len(stack["left"]) == stack["blocks"]:
        return f"`{name}`"
    return ", ".join(f"`{block}`" for block in stack["left"])


def main(arguments: Sequence[str]) -> None:
    if "--docs" not in arguments:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        rows = [measure(family) for family in families.all_families()]
        result = {"provenance": provenance("cpu"), "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    made = table(result["rows"])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda match: match[1] + made + match[2], page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
