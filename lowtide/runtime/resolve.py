"""From a model to its block stacks: by a family's rows, or by structure where no row knows the model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lowtide.errors import UnsupportedError
from lowtide.families.row import Stack

_FEED_FORWARD = re.compile(r"(^|_)(ff|ffn|mlp|feed_?forward)(_|\d|$)")
_ATTENTION = re.compile(r"attn|attention")
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


@dataclass(frozen=True)
class ResolvedStack:
    """A stack of one model: its blocks as (module path, module) in call order.

    found: True where the stack was discovered by structure, False where a row declares it.
    """

    name: str
    blocks: list[tuple[str, nn.Module]]
    row: Stack
    found: bool

    def chains(self, block: nn.Module) -> list[list[tuple[str, nn.Module]]]:
        """The feed-forward chains that this block really has; modules that it lacks are left out."""
        chains = [_present(block, chain) for chain in self.row.feed_forward]
        return [chain for chain in chains if chain]

    def attention_sides(self, block: nn.Module) -> list[tuple[str, nn.Module]]:
        """What belongs to attention in this block: its softmax-attention modules and the norms that feed them.

        A norm that feeds another side, too, is among them: what it saves is the block's input.
        """
        attention = _present(block, self.row.attention)
        return _unique(_present(block, self.row.attention_norms) + attention) if attention else []

    @property
    def has_feed_forward(self) -> bool:
        return any(self.chains(block) for _, block in self.blocks)

    @property
    def has_attention(self) -> bool:
        """Whether a block has a softmax-attention module that the row names."""
        return any(self.attention_sides(block) for _, block in self.blocks)


def resolve(model: nn.Module, stacks: Sequence[Stack] | None) -> list[ResolvedStack]:
    """The stacks of ``model``: the given rows, or, with ``None``, what its structure shows.

    Raises UnsupportedError where a row matches no block of this model, or nothing is found.
    """
    if stacks is None:
        return _discover(model)
    resolved = [ResolvedStack(row.name, _unique(_expand_all(model, row)), row, found=False) for row in stacks]
    missing = [stack.name for stack in resolved if not stack.blocks]
    if len(missing) == len(resolved):
        raise UnsupportedError(
            f"{type(model).__name__} has none of the block stacks that its family declares ({', '.join(missing)}); "
            "is it a model of that family? Leave `family` out to have the stacks found by structure."
        )
    return [stack for stack in resolved if stack.blocks]


def expand(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Modules that a row's pattern names, in order. ``*`` every child; ``{a.#|b.#}`` interleaves by index."""
    return list(_walk(model, "", _split(pattern)))


def _expand_all(model: nn.Module, row: Stack) -> list[tuple[str, nn.Module]]:
    return [match for pattern in row.blocks for match in expand(model, pattern)]


def _split(pattern: str) -> list[str]:
    """Dot-separated parts; a ``{…}`` group stays one part."""
    return re.findall(r"\{[^}]*\}|[^.]+", pattern)


def _walk(module: nn.Module, path: str, parts: list[str]) -> Iterator[tuple[str, nn.Module]]:
    if not parts:
        yield path, module
        return
    part, rest = parts[0], parts[1:]
    if part.startswith("{"):
        yield from _interleave(module, path, part[1:-1].split("|"), rest)
        return
    for name, child in module.named_children():
        if part in ("*", name):
            yield from _walk(child, f"{path}.{name}" if path else name, rest)


def _interleave(
    module: nn.Module, path: str, alternatives: list[str], rest: list[str]
) -> Iterator[tuple[str, nn.Module]]:
    index, found = 0, True
    while found:
        found = False
        for alternative in alternatives:
            for match in _walk(module, path, _split(alternative.replace("#", str(index))) + rest):
                found = True
                yield match
        index += 1


def _unique(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """A module that stands in a stack twice is one block: it is called twice."""
    seen: dict[int, tuple[str, nn.Module]] = {}
    for path, module in blocks:
        seen.setdefault(id(module), (path, module))
    return list(seen.values())


def child(block: nn.Module, path: str) -> nn.Module | None:
    """The module at a path inside ``block``, or None where there is none."""
    module: nn.Module | None = block
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


def _present(block: nn.Module, paths: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = [(path, child(block, path)) for path in paths]
    return [(path, module) for path, module in found if module is not None]


def _discover(model: nn.Module) -> list[ResolvedStack]:
    found = list(_lists_of_blocks(model, ""))
    if not found:
        raise UnsupportedError(
            f"no block stack was found in {type(model).__name__}: lowtide looks for lists of at least two composite "
            "modules of one class. Wrap the parts to recompute with `lowtide.checkpoint` instead."
        )
    return [ResolvedStack(path, _unique(blocks), _guess_row(path, blocks), found=True) for path, blocks in found]


def _lists_of_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_stack(child):
            yield child_path, [(f"{child_path}.{index}", block) for index, block in child.named_children()]
        else:
            yield from _lists_of_blocks(child, child_path)


def _is_stack(modules: nn.Module) -> bool:
    children = list(modules.children())
    return len(children) >= 2 and _are_of_a_kind(children) and all(map(_is_composite, children))


def _are_of_a_kind(modules: list[nn.Module]) -> bool:
    """Whether the classes have an ancestor of their own; nn.Module, that every class has, does not count."""
    shared = set(type(modules[0]).__mro__).intersection(*(type(module).__mro__ for module in modules[1:]))
    return any(kind.__module__.partition(".")[0] != "torch" and issubclass(kind, nn.Module) for kind in shared)


def _is_composite(module: nn.Module) -> bool:
    return sum(isinstance(part, _LEAVES) for part in module.modules()) >= 2 and not isinstance(module, _LEAVES)


def _guess_row(path: str, blocks: list[tuple[str, nn.Module]]) -> Stack:
    children: dict[str, nn.Module] = {}
    for _, block in blocks:
        children.update((name, module) for name, module in block.named_children() if name not in children)
    norms = [name for name, module in children.items() if "norm" in name or isinstance(module, _NORMS)]
    attention = [name for name in children if _ATTENTION.search(name) and name not in norms]
    feed_forward = [name for name in children if _FEED_FORWARD.search(name) and name not in norms]
    fed_by = _fed_by(norms, attention, feed_forward)
    return replace(
        Stack(name=path, blocks=(f"{path}.*",)),
        feed_forward=tuple(_chain(name, fed_by.get(name), children) for name in feed_forward),
        attention=tuple(attention),
        attention_norms=tuple(fed_by[name] for name in attention if name in fed_by),
    )


def _fed_by(norms: list[str], attention: list[str], feed_forward: list[str]) -> dict[str, str]:
    """Name of the norm before each sublayer, where there is one for each: norm1, norm2 for self_attn, mlp, say.

    A wrong guess costs a recomputation of the norm: the engine joins a chain only where a tensor is handed on.
    """
    sublayers = [*attention, *feed_forward]
    if not attention or len(norms) != len(sublayers):
        return {}
    return dict(zip(sublayers, sorted(norms, key=_last_number), strict=True))


def _last_number(name: str) -> int:
    return int((re.findall(r"\d+", name) or [0])[-1])


def _chain(name: str, norm: str | None, children: Mapping[str, nn.Module]) -> tuple[str, ...]:
    return (name,) if norm is None or not _is_plain_norm(children[norm]) else (norm, name)


def _is_plain_norm(module: nn.Module) -> bool:
    """Batch norm counts its calls; a norm without weights is followed by modulation, so it feeds no feed-forward."""
    counts = any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules())
    return not counts and next(module.parameters(), None) is not None
