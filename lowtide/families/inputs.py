"""Constructors of the input language: plain dicts that say how to make the arguments of a forward.

``measure.inputs`` turns them into tensors. A size is an integer or an expression over the build's ``vars`` and ``let``
("F*lh*lw"). ``"compute"`` stands for the model's own dtype. Plain numbers, strings, None, lists and dicts of nodes are
themselves.
"""

from typing import Any

Size = int | str
Node = dict[str, Any]


def randn(*shape: Size) -> Node:
    """Standard normal, in the model's dtype."""
    return {"gen": "randn", "shape": list(shape), "dtype": "compute"}


def rand(*shape: Size, scale: float = 1.0) -> Node:
    """Uniform in [0, scale), in the model's dtype: the usual time step."""
    return {"gen": "rand", "shape": list(shape), "dtype": "compute", "scale": scale}


def randint(*shape: Size, high: int) -> Node:
    """Whole numbers in [0, high), int64."""
    return {"gen": "randint", "shape": list(shape), "dtype": "int64", "high": high}


def zeros(*shape: Size, dtype: str = "float32") -> Node:
    return {"gen": "full", "shape": list(shape), "dtype": dtype, "value": 0}


def full(value: float, *shape: Size, dtype: str = "compute") -> Node:
    return {"gen": "full", "shape": list(shape), "dtype": dtype, "value": value}


def ones(*shape: Size, dtype: str = "int64") -> Node:
    """A mask that leaves nothing out."""
    return {"gen": "full", "shape": list(shape), "dtype": dtype, "value": 1}


def mask(*shape: Size, lengths: tuple[Size, ...], dtype: str = "int64") -> Node:
    """[B, T]: row b is one in its first ``lengths[b]`` columns; rows beyond the list take its last length."""
    return {"gen": "mask", "shape": list(shape), "dtype": dtype, "lengths": list(lengths)}


def grid(
    *axes: Size,
    dtype: str = "float32",
    scale: tuple[float, ...] = (),
    offset: tuple[float, ...] = (),
    batch: Size | None = None,
) -> Node:
    """Every position of a grid, [product of axes, number of axes]: the ids of rotary embeddings.

    scale, offset: per axis; a position becomes position * scale + offset. batch: the grid that many times, in front.
    """
    node: Node = {"gen": "grid", "axes": list(axes), "dtype": dtype}
    given = {"scale": list(scale), "offset": list(offset), "batch": batch}
    return node | {name: value for name, value in given.items() if value}


def count(*shape: Size, start: Size = 0) -> Node:
    """start, start + 1, ... along the last dimension, the same in every row, int64."""
    return {"gen": "count", "shape": list(shape), "dtype": "int64", "start": start}


def per_row(*values: Size) -> Node:
    """[B], int64: a value a row; rows beyond the list take its last value."""
    return {"gen": "per_row", "shape": ["B"], "dtype": "int64", "values": list(values)}


def read(item: Node) -> Node:
    """A floating-point tensor whose values the forward asks for: it has them even where others have shapes only.

    Whole numbers and masks always have theirs.
    """
    return item | {"read": True}


def joined(*items: Node, dim: int) -> Node:
    """Tensors, concatenated."""
    return {"cat": list(items), "dim": dim}


def size(expression: Size) -> Node:
    """A whole number."""
    return {"expr": expression}


def several(count: Size, item: Any) -> Node:
    """A list of ``count`` values, each made anew from ``item``."""
    return {"repeat": count, "item": item}


def fixed(*items: Any) -> Node:
    """A tuple."""
    return {"tuple": list(items)}


def numbered(items: dict[int, Any]) -> Node:
    """A dict with whole numbers as keys."""
    return {"intkeys": {str(key): value for key, value in items.items()}}


def when(condition: Size, item: Any) -> Node:
    """``item`` if the expression is not zero, else None."""
    return {"when": condition, "item": item}
