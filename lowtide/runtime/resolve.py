"""From a model to its block stacks: by a family's rows, or by structure where no row knows the model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lowtide.errors import UnsupportedError
from lowtide.families.row import Stack

_FEED_FORWARD = re.compile(r"(^|_)(ff|ffn|mlp|feed_?forward)(_|\d|$)")
_ATTENTION = re.compile(r"attn|attention")
_NUMBER = re.compile(r"\d+")
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
    if isinstance(model, nn.Sequential) and _is_stack(model):
        found = [(type(model).__name__, list(model.named_children()))]
    else:
        found = list(_groups_of_blocks(model, ""))
    if not found:
        raise UnsupportedError(
            f"no block stack was found in {type(model).__name__}: lowtide looks for two or more modules of one class, "
            "in a list or with names that differ in their number only, each of which holds at least two layers that "
            f"multiply ({', '.join(leaf.__name__ for leaf in _LEAVES)}; norms and embeddings do not count). Wrap the "
            "parts to recompute with `lowtide.checkpoint` instead."
        )
    return [ResolvedStack(name, _unique(blocks), _guess_row(name, blocks), found=True) for name, blocks in found]


def _groups_of_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Stacks in ``module``, the outermost ones only, each with its name: of a list its path, else ``path.block*``."""
    grouped = dict(_numbered_siblings(module))
    for name, child in module.named_children():
        child_path = _joined(path, name)
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_stack(child):
            yield child_path, [(f"{child_path}.{index}", block) for index, block in child.named_children()]
        elif name not in grouped:
            yield from _groups_of_blocks(child, child_path)
        elif siblings := grouped[name]:
            yield _joined(path, _NUMBER.sub("*", name)), [(_joined(path, other), block) for other, block in siblings]


def _numbered_siblings(module: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Children that are blocks of one stack by their names, ``block1`` and ``block2`` say: all of them at the first's
    name, none at the others'."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, child in module.named_children():
        if _NUMBER.search(name) and not _is_side(name) and "norm" not in name:
            groups.setdefault(_NUMBER.sub("*", name), []).append((name, child))
    for group in groups.values():
        modules = [child for _, child in group]
        if len(modules) >= 2 and _are_of_a_kind(modules) and all(map(_is_composite, modules)):
            yield group[0][0], group
            yield from ((name, []) for name, _ in group[1:])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_stack(modules: nn.Module) -> bool:
    children = list(modules.children())
    if len(children) < 2 or not all(map(_is_composite, children)):
        return False
    return _are_of_a_kind(children) or (isinstance(modules, nn.ModuleList) and _take_turns(children))


def _are_of_a_kind(modules: list[nn.Module]) -> bool:
    """Whether the classes have an ancestor of their own; nn.Module, that every class has, does not count."""
    shared = set(type(modules[0]).__mro__).intersection(*(type(module).__mro__ for module in modules[1:]))
    return any(kind.__module__.partition(".")[0] != "torch" and issubclass(kind, nn.Module) for kind in shared)


def _take_turns(modules: list[nn.Module]) -> bool:
    """Whether every class is there more than once: micro-blocks of several kinds in turn."""
    kinds = [type(module) for module in modules]
    return all(kinds.count(kind) >= 2 and kind not in (nn.ModuleList, nn.Sequential, nn.ModuleDict) for kind in kinds)


def _is_composite(module: nn.Module) -> bool:
    """Whether it holds at least two layers that multiply. One and a norm are part of a block rather than a block."""
    return sum(isinstance(part, _LEAVES) for part in module.modules()) >= 2 and not isinstance(module, _LEAVES)


def _guess_row(name: str, blocks: list[tuple[str, nn.Module]]) -> Stack:
    children: dict[str, nn.Module] = {}
    for _, block in blocks:
        children.update((path, module) for path, module in _parts(block) if path not in children)
    norms = [path for path, module in children.items() if _is_norm(path, module)]
    attention = [path for path in children if _ATTENTION.search(_own_name(path)) and path not in norms]
    feed_forward = [path for path in children if _FEED_FORWARD.search(_own_name(path)) and path not in norms]
    fed_by = _fed_by(norms, attention, feed_forward)
    return replace(
        Stack(name=name, blocks=tuple(path for path, _ in blocks)),
        feed_forward=tuple(_chain(names, fed_by.get(names[0]), children) for names in _sides(feed_forward, children)),
        attention=tuple(attention),
        attention_norms=tuple(fed_by[path] for path in attention if path in fed_by),
    )


def _parts(block: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """A block's sublayers, with their paths: its children, or those of the one module that it wraps."""
    children = list(block.named_children())
    name, inner = children[0] if len(children) == 1 else ("", block)
    if inner is not block and _is_composite(inner) and not _is_side(name):
        return _parts(inner, f"{prefix}{name}.")
    return [(prefix + name, module) for name, module in children]


def _is_side(name: str) -> bool:
    return bool(_FEED_FORWARD.search(name) or _ATTENTION.search(name))


def _own_name(path: str) -> str:
    return path.rpartition(".")[2]


def _is_norm(path: str, module: nn.Module) -> bool:
    return "norm" in _own_name(path) or isinstance(module, _NORMS) or "Norm" in type(module).__name__


def _sides(names: list[str], children: Mapping[str, nn.Module]) -> list[list[str]]:
    """Feed-forward modules, each a side; layers that are called inline (``proj_mlp``, ``act_mlp``) are one together."""
    sides: list[list[str]] = []
    for name in names:
        inline = _is_layer(children[name])
        if inline and sides and _is_layer(children[sides[-1][-1]]):
            sides[-1].append(name)
        else:
            sides.append([name])
    return sides


def _is_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


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


def _chain(names: list[str], norm: str | None, children: Mapping[str, nn.Module]) -> tuple[str, ...]:
    return (*names,) if norm is None or not _is_plain_norm(children[norm]) else (norm, *names)


def _is_plain_norm(module: nn.Module) -> bool:
    """Batch norm counts its calls; a norm without weights is followed by modulation, so it feeds no feed-forward."""
    counts = any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules())
    return not counts and next(module.parameters(), None) is not None
