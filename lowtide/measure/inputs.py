"""Turns the input language of ``families.inputs`` into the arguments of a forward."""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.families.row import Build
from lowtide.measure.allowed import SIZE_WORDS

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable[..., int]] = {"max": max, "min": min}


def evaluate(expression: int | str, names: Mapping[str, Any]) -> int:
    """A whole number from an expression over ``names``: + - * // % max min, nothing else.

    Raises ConfigError for anything else, an unknown name included.
    """
    if isinstance(expression, int):
        return expression
    try:
        return _value(ast.parse(expression, mode="eval").body, names)
    except (SyntaxError, ZeroDivisionError, _NotAllowed) as error:
        raise ConfigError(f"cannot evaluate the size {expression!r}: {error}") from error


class _NotAllowed(Exception):
    pass


def _value(node: ast.expr, names: Mapping[str, Any]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if isinstance(names.get(name), int):
            return int(names[name])
        case ast.Name(id=name):
            raise _NotAllowed(f"{name!r} is not a whole number here; known: {', '.join(map(str, names))}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return _CALLS[name](*(_value(arg, names) for arg in args))
    raise _NotAllowed(f"{ast.unparse(node)!r} is not allowed; allowed: names, whole numbers, + - * // %, max, min")


def namespace(build: Build, over: Mapping[str, int] | None = None) -> dict[str, int]:
    """``build.vars``, some of them overridden, and the names that ``build.let`` derives from them.

    Raises ConfigError for an override that the build has no name for.
    """
    over = over or {}
    unknown = sorted(set(over) - set(build.vars))
    if unknown:
        raise ConfigError(f"unknown size {_listed(unknown)}; this family has: {_listed(build.vars)}")
    names = {**build.vars, **over}
    for name, expression in build.let.items():
        names[name] = evaluate(expression, names)
    return names


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name} ({SIZE_WORDS[name]})" if name in SIZE_WORDS else name for name in names)


def sizes_for(sizes: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, int]:
    """The ``vars`` that a configuration decides (``Family.sizes``), from its values: to be passed as ``over``."""
    return {name: int(evaluate(expression, config)) for name, expression in sizes.items()}


def build_inputs(
    build: Build,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    over: Mapping[str, int] | None = None,
    *,
    variant: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Keyword arguments of a forward.

    dtype: of every tensor that follows the model. seed: of the values; the same seed gives the same values on every
    device that has any. over: other values for ``build.vars``. variant: further arguments, or others, in the input
    language. device: "meta" gives floating-point tensors without values; whole numbers, masks and what the forward
    reads (``families.inputs.read``) may decide shapes, so they have values and are in CPU memory.
    """
    decoder = _Decoder(namespace(build, over), dtype, torch.Generator().manual_seed(seed), torch.device(device))
    return {name: decoder.decode(node) for name, node in {**build.inputs, **(variant or {})}.items()}


class _Decoder:
    """One pass over the nodes of a build: sizes by name, one generator for all values."""

    def __init__(self, names: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device):
        self.names = names
        self.dtype = dtype
        self.generator = generator
        self.device = device

    def decode(self, node: Any) -> Any:
        match node:
            case {"gen": kind}:
                return self._tensor(kind, node)
            case {"cat": items, "dim": dim}:
                return torch.cat([self.decode(item) for item in items], dim)
            case {"expr": expression}:
                return self._size(expression)
            case {"tuple": items}:
                return tuple(self.decode(item) for item in items)
            case {"repeat": count, "item": item}:
                return [self.decode(item) for _ in range(self._size(count))]
            case {"intkeys": items}:
                return {int(key): self.decode(item) for key, item in items.items()}
            case {"when": condition, "item": item}:
                return self.decode(item) if self._size(condition) else None
            case dict():
                return {key: self.decode(item) for key, item in node.items()}
            case list():
                return [self.decode(item) for item in node]
        return node

    def _size(self, expression: int | str) -> int:
        return evaluate(expression, self.names)

    def _tensor(self, kind: str, node: Mapping[str, Any]) -> torch.Tensor:
        dtype = self.dtype if node["dtype"] == "compute" else getattr(torch, node["dtype"])
        on_meta = self.device.type == "meta"
        has_values = not on_meta or not dtype.is_floating_point or node.get("read", False)
        device = torch.device("cpu") if on_meta and has_values else self.device
        if kind == "grid":
            return self._grid(node).to(device, dtype)
        shape = [self._size(size) for size in node["shape"]]
        if not has_values:
            return torch.empty(shape, dtype=dtype, device=device)
        return self._filled(kind, node, shape).to(device, dtype)

    def _filled(self, kind: str, node: Mapping[str, Any], shape: list[int]) -> torch.Tensor:
        match kind:
            case "randn":
                return torch.randn(shape, generator=self.generator)
            case "rand":
                return torch.rand(shape, generator=self.generator) * node["scale"]
            case "randint":
                return torch.randint(node["high"], shape, generator=self.generator)
            case "full":
                return torch.full(shape, node["value"])
            case "mask":
                return self._mask(shape, node["lengths"])
            case "per_row":
                return self._per_row(shape[0], node["values"])
            case "count":
                return (torch.arange(shape[-1]) + self._size(node["start"])).expand(shape).contiguous()
        raise ConfigError(
            f"unknown kind of input {kind!r}; known: randn, rand, randint, full, mask, per_row, count, grid"
        )

    def _grid(self, node: Mapping[str, Any]) -> torch.Tensor:
        axes = node["axes"]
        grid = torch.cartesian_prod(*(torch.arange(self._size(axis)) for axis in axes)).view(-1, len(axes))
        if "scale" in node:
            grid = grid * torch.tensor(node["scale"])
        if "offset" in node:
            grid = grid + torch.tensor(node["offset"])
        return grid.repeat(self._size(node["batch"]), 1, 1) if "batch" in node else grid

    def _mask(self, shape: list[int], lengths: list[int | str]) -> torch.Tensor:
        rows, columns = shape
        return torch.arange(columns)[None] < self._per_row(rows, lengths)[:, None]

    def _per_row(self, rows: int, values: list[int | str]) -> torch.Tensor:
        return torch.tensor([self._size(values[min(row, len(values) - 1)]) for row in range(rows)])
