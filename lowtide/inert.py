"""Options that were honoured and changed no treatment in a step: the receipt lists them."""

from collections.abc import Iterator, Sequence

from lowtide.controls import CheckpointConfig
from lowtide.plan.schedule import IN_SEGMENTS, KEPT, WHOLE
from lowtide.runtime.receipt import BlockReceipt, Copies, Note


def inert(config: CheckpointConfig, blocks: Sequence[BlockReceipt], copies: Copies) -> Iterator[Note]:
    """What of ``config`` changed nothing, and why."""
    treatments = {block.name: block.treatment.removesuffix("+offload") for block in blocks}
    in_segments = [b for b in blocks if treatments[b.name] in IN_SEGMENTS and b.segment is not None]
    interval, stride = config.interval or 1, config.segment_stride
    if interval > 1 and in_segments and len({block.segment for block in in_segments}) == len(in_segments):
        yield Note("interval", "no segment held more than one block in this step")
    if stride is not None and KEPT not in treatments.values():
        yield Note("segment_stride", "no block was left between two segments")
    treated = [block for block in blocks if treatments[block.name] != KEPT]
    if treated and not any(block.recompute_calls for block in treated):
        yield Note("backend", "nothing was recomputed in this step: no backward yet, or no block needed a gradient")
    if config.offload_attention and set(treatments.values()) == {WHOLE}:
        yield Note("offload_attention", "attention is recomputed")
    elif config.offload_attention and config.backend == "unsloth-selective":
        yield Note("offload_attention", "the outputs of the attention kernels wait in CPU memory already")
    elif not copies.d2h_bytes and any(block.kept_bytes for block in blocks):
        moving = any(block.treatment.endswith("+offload") for block in blocks)
        if not config.moves and not moving:
            return
        option = "offload_attention" if config.offload_attention else "backend" if config.moves else "schedule"
        yield Note(option, _why_nothing_moved(config, blocks))


def _why_nothing_moved(config: CheckpointConfig, blocks: Sequence[BlockReceipt]) -> str:
    if not any(block.treatment.endswith("+offload") for block in blocks):
        return "nothing was moved: what runs last stays on the device, and that is all there is to move"
    return f"nothing was moved: no storage of offload_min_bytes ({config.offload_min_bytes}) or more to move"
