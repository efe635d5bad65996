"""Results of the tools that are no cells of a sweep, as lines of JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Add one line; the folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields, ensure_ascii=False) + "\n")
