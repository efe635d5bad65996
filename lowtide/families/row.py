"""What one row of family knowledge says. Data only: needs neither torch nor diffusers."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stack:
    """Blocks of like kind that a model runs in order.

    name: what people read, and the key of the stack in schedules and receipts.
    blocks: patterns of module paths, in call order. ``*`` stands for every child index in order;
        ``{a.#|b.#.c.*}`` interleaves: for each index ``#``, first every match of ``a.#``, then of ``b.#.c.*``.
        ``"transformer_blocks.*"`` is the common case.
    feed_forward: chains of submodule paths inside a block, in call order: the modules of one feed-forward side,
        from the norm that feeds it (where its output goes straight into the feed-forward) to its output.
        One chain a stream; empty: this stack has no feed-forward side.
    attention: softmax-attention submodules inside a block (linear attention is left out).
    attention_norms: norms inside a block that feed those, straight or through modulation.
    carry: argument names that decide whether a segment goes on; empty: the engine decides by size.
    """

    name: str
    blocks: tuple[str, ...]
    feed_forward: tuple[tuple[str, ...], ...] = ()
    attention: tuple[str, ...] = ()
    attention_norms: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()


@dataclass(frozen=True)
class Build:
    """One configuration of a model class and the inputs of its forward.

    config: keyword arguments of the class.
    vars: named integers (B batch, H height and W width in pixels, FR frames, T text tokens …); a caller may override
        them.
    let: further names, as expressions over ``vars`` and each other, in order.
    inputs: keyword arguments of forward in the input language of ``measure.inputs``.
    """

    config: dict[str, Any]
    vars: dict[str, int]
    let: dict[str, str]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One model family: names, class, stacks, a tiny and a real configuration.

    real: its sizes are those of the public sweep's example, where that has the family (``bench.reference``).
    parameters: count of the real configuration. published: the size its makers state, as text.
    variants: further inputs of the tiny configuration, by name (a ControlNet residual, say): they are merged over
        ``tiny.inputs``.
    sizes: the ``vars`` that a configuration decides, as expressions over its keys ({"C": "in_channels"}): so the
        inputs fit any configuration of the class, a model loaded from a folder too.
    train_mode: False where the model must be in eval() to be differentiable.
    block_classes: classes that regional compilation compiles.
    left_out: paths of modules that look like a stack and save next to nothing.
    lora_targets: where the trainer puts a LoRA: a regular expression over module paths. Attention and feed-forward
        layers. None: it does not train this family.
    """

    key: str
    title: str
    class_path: str
    stacks: tuple[Stack, ...]
    tiny: Build
    real: Build
    aliases: tuple[str, ...] = ()
    parameters: int = 0
    published: str = ""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)
    train_mode: bool = True
    block_classes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    lora_targets: str | None = None

    @property
    def class_name(self) -> str:
        return self.class_path.rpartition(".")[2]
