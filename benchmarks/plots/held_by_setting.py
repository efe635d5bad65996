"""What each setting keeps for backward: Flux.1's real configuration, LoRA, from shapes alone.

The model stands on the meta device: no weights, no GPU, no step. One forward is traced for what autograd saves, then
``lowtide.plan`` works out what each setting keeps of it and what it recomputes at once. Attention is traced as a fused
kernel holds it (FlashAttention and its like), because that is what runs on a GPU.

Run: python benchmarks/plots/held_by_setting.py [--resolution 1024] [--batch 1]
Writes docs/images/held_by_setting.svg and appends the numbers to benchmarks/results/held_by_setting.jsonl.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from peft import LoraConfig

from lowtide import families
from lowtide.controls import CheckpointConfig
from lowtide.handle import schedule_for
from lowtide.measure.build import build_model
from lowtide.measure.held import trace_held
from lowtide.measure.inputs import build_inputs
from lowtide.plan.held import HeldTrace, predict
from lowtide.plan.schedule import FFN, WHOLE, Schedule
from lowtide.runtime.resolve import resolve

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "docs" / "images" / "held_by_setting.svg"
RESULTS = ROOT / "benchmarks" / "results" / "held_by_setting.jsonl"
GIB = 2**30

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "off": {"gradient_checkpointing": False},
    "torch-ffn": {"backend": "torch-ffn"},
    "torch, interval 1, stride 2": {"interval": 1, "segment_stride": 2},
    "torch, interval 2, stride 4": {"interval": 2, "segment_stride": 4},
    "torch": {},
    "torch, interval 2": {"interval": 2},
    "torch, interval 4": {"interval": 4},
}


@dataclass(frozen=True)
class Row:
    """One setting. piece_bytes: the largest segment's activations, which backward makes again at once.

    recomputed: blocks that are recomputed, whole or their feed-forward side, out of ``blocks``.
    """

    setting: str
    held_bytes: int
    piece_bytes: int
    recomputed: int
    blocks: int
    only_feed_forward: bool


def rows(resolution: int, batch: int) -> list[Row]:
    family = families.find("flux1")
    model: Any = build_model(family, "real", device="meta", dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    over = {"H": resolution, "W": resolution, "B": batch}
    inputs = build_inputs(family.real, torch.bfloat16, 0, over, device="meta")
    stacks = resolve(model, family.stacks)
    trace = trace_held(model, stacks, inputs)
    return [
        row(name, trace, schedule_for(stacks, CheckpointConfig(**keys)), sum(len(stack.blocks) for stack in stacks))
        for name, keys in SETTINGS.items()
    ]


def row(name: str, trace: HeldTrace, schedule: Schedule, blocks: int) -> Row:
    held = predict(trace, schedule)
    stacks = schedule.stacks.values()
    whole, partly = (sum(stack.count(treatment) for stack in stacks) for treatment in (WHOLE, FFN))
    return Row(
        setting=name,
        held_bytes=held.held_bytes,
        piece_bytes=max(map(trace.piece_bytes, held.segments), default=0),
        recomputed=whole + partly,
        blocks=blocks,
        only_feed_forward=partly > 0,
    )


def draw(data: list[Row], title: str) -> None:
    pyplot.rcParams.update({"svg.hashsalt": "lowtide", "font.size": 10})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2), sharey=True)
    names = [row.setting for row in data]
    held = [row.held_bytes / GIB for row in data]
    piece = [row.piece_bytes / GIB for row in data]
    left.barh(names, held, color="#2b6cb0", label="kept for backward")
    left.barh(names, piece, left=held, color="#90cdf4", label="+ largest piece made again at once")
    for place, (kept, more) in enumerate(zip(held, piece, strict=True)):
        left.text(kept + more, place, f"  {kept + more:.1f}", va="center")
    left.set_xlabel("activations, GiB")
    left.set_xlim(0, max(kept + more for kept, more in zip(held, piece, strict=True)) * 1.12)
    left.legend(frameon=False, loc="lower right")
    left.invert_yaxis()
    recomputed(right, data)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, metadata={"Date": None})


def recomputed(axes: Axes, data: list[Row]) -> None:
    colors = ["#f6ad55" if row.only_feed_forward else "#c05621" for row in data]
    axes.barh([row.setting for row in data], [row.recomputed for row in data], color=colors)
    for place, row in enumerate(data):
        what = "feed-forward sides" if row.only_feed_forward else "blocks"
        axes.text(row.recomputed + 1, place, f"{row.recomputed} {what}" if row.recomputed else "nothing", va="center")
    axes.set_xlabel(f"computed a second time in backward (of {data[0].blocks} blocks)")
    axes.set_xlim(0, data[0].blocks * 1.8)
    axes.set_xticks([0, 20, 40, data[0].blocks])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolution", type=int, default=1024, help="pixels a side (default 1024)")
    parser.add_argument("--batch", type=int, default=1, help="pictures in a batch (default 1)")
    options = parser.parse_args()
    data = rows(options.resolution, options.batch)
    size = f"{options.resolution}×{options.resolution}, batch {options.batch}"
    draw(data, f"Flux.1 (12 B), LoRA rank 16 on attention, bf16, {size}: activations by setting")
    line = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: version(package) for package in ("torch", "diffusers", "peft")},
        "family": "flux1",
        "resolution": options.resolution,
        "batch": options.batch,
        "rows": [vars(row) for row in data],
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    for entry in data:
        print(
            f"{entry.setting:<30} kept {entry.held_bytes / GIB:6.2f} GiB, piece {entry.piece_bytes / GIB:5.2f} GiB, "
            f"recomputed {entry.recomputed} of {entry.blocks}"
        )
    print(f"wrote {IMAGE}")


if __name__ == "__main__":
    main()
