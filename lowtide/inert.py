"""Options that changed no treatment in a step, or never can with a model: receipts and inspections list them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from lowtide.controls import CheckpointConfig
from lowtide.plan.schedule import FFN, IN_SEGMENTS, KEPT, SELECTIVE, WHOLE
from lowtide.runtime.receipt import BlockReceipt, Copies, Note
from lowtide.runtime.unit import NO_FEED_FORWARD

RECOMPUTED = "attention is recomputed"
MOVED_ALREADY = "the outputs of the attention kernels wait in CPU memory already"


def ignored(config: CheckpointConfig, depths: Iterable[int]) -> Iterator[Note]:
    """What of ``config`` a model with stacks of these depths can never honour, and why."""
    deepest, width = max(depths, default=0), config.interval or 1
    if width > 1 and deepest == 1:
        yield Note("interval", "no block stack of this model has more than one block")
    if config.segment_stride is not None and deepest <= width:
        blocks = "one block" if width == 1 else f"{width} blocks"
        yield Note("segment_stride", f"no block stack of this model has more than {blocks}, so there is no gap")


def attention_offload(config: CheckpointConfig, blocks: Sequence[tuple[str, bool]]) -> Iterator[Note]:
    """Where attention offload will move nothing. blocks: each one's treatment, and whether it has softmax attention."""
    if not config.offload_attention:
        return
    if config.backend == "unsloth-selective" and config.scope is not None:
        yield Note("offload_attention", MOVED_ALREADY)
        return
    with_attention = [treatment for treatment, has_attention in blocks if has_attention]
    without, recomputed = len(blocks) - len(with_attention), with_attention.count(WHOLE)
    if recomputed == len(with_attention):
        yield Note("offload_attention", RECOMPUTED)
    elif recomputed:
        yield Note("offload_attention", f"{RECOMPUTED} in {recomputed} of {len(blocks)} blocks")
    if without and recomputed < len(with_attention):
        yield Note("offload_attention", f"{without} of {len(blocks)} blocks have no softmax attention")


def untreated(config: CheckpointConfig, treatments: Collection[str]) -> Iterator[Note]:
    """Where a backend recomputes nothing: every block of the model is kept."""
    if config.scope is not None and set(treatments) == {KEPT}:
        chosen = (
            "those that interval and stride choose have no feed-forward" if config.scope == FFN else "see each block"
        )
        yield Note("backend", f"no block is recomputed: {chosen}")


def inert(
    config: CheckpointConfig, blocks: Sequence[BlockReceipt], copies: Copies, kernels_kept: bool
) -> Iterator[Note]:
    """What of ``config`` changed nothing in a step, and why. kernels_kept: whether attention kernels' outputs were."""
    treatments = {block.name: block.treatment.removesuffix("+offload") for block in blocks}
    in_segments = [b for b in blocks if treatments[b.name] in IN_SEGMENTS and b.segment is not None]
    interval, stride = config.interval or 1, config.segment_stride
    if interval > 1 and in_segments and len({block.segment for block in in_segments}) == len(in_segments):
        yield Note("interval", "no segment held more than one block in this step")
    if stride is not None and _no_gap(config, blocks, treatments):
        yield Note("segment_stride", "no block was left between two segments")
    yield from untreated(config, treatments.values())
    treated = [block for block in blocks if treatments[block.name] != KEPT]
    if treated and not any(block.recompute_calls for block in treated):
        yield Note("backend", "nothing was recomputed in this step: no backward yet, or no block needed a gradient")
    elif treated and config.scope == SELECTIVE and not kernels_kept:
        yield Note("backend", "no attention kernel's outputs are kept, so whole blocks are recomputed: see fallbacks")
    if config.offload_attention and config.backend_moves and treated and not copies.d2h_bytes:
        yield Note("backend", _why_nothing_moved(config, blocks))
    if config.offload_attention and set(treatments.values()) == {WHOLE}:
        yield Note("offload_attention", RECOMPUTED)
    elif config.offload_attention and config.backend == "unsloth-selective":
        yield Note("offload_attention", MOVED_ALREADY)
    elif not copies.d2h_bytes and any(block.kept_bytes for block in blocks) and (treated or config.offload_attention):
        moving = any(block.treatment.endswith("+offload") for block in blocks)
        if not config.moves and not moving:
            return
        option = "offload_attention" if config.offload_attention else "backend" if config.moves else "schedule"
        yield Note(option, _why_nothing_moved(config, blocks))


def _no_gap(config: CheckpointConfig, blocks: Sequence[BlockReceipt], treatments: Mapping[str, str]) -> bool:
    """Whether the stride leaves nothing out. Of feed-forwards an interval alone leaves some out, which it changes."""
    if config.scope == FFN and (config.interval or 1) > 1:
        return False
    return not any(treatments[block.name] == KEPT and block.reason != NO_FEED_FORWARD for block in blocks)


def _why_nothing_moved(config: CheckpointConfig, blocks: Sequence[BlockReceipt]) -> str:
    if not any(block.treatment.endswith("+offload") for block in blocks):
        return "nothing was moved: what runs last stays on the device, and that is all there is to move"
    return (
        f"nothing was moved: what there is to move is smaller than offload_min_bytes ({config.offload_min_bytes}), or "
        "something else holds it on the device"
    )
