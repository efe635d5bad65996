"""What blocks keep under bf16 autocast: as ``lowtide plan`` forecasts it from shapes, and as a step on a card shows.

    python benchmarks/autocast_bytes.py sd3_medium wan21_1_3b:FR=33 --save results/autocast_bytes.jsonl

Weights that are frozen are bfloat16, those that are trained float32. No checkpointing.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.bench.provenance import provenance
from lowtide.measure.adapter import add_lora
from lowtide.measure.build import Target, open_target
from lowtide.measure.cards import find_card
from lowtide.measure.meter import meter_of
from lowtide.measure.parity import loss_of
from lowtide.measure.planning import Wish, plain_bytes
from lowtide.measure.probe import StepProbe
from lowtide.runtime.resolve import ResolvedStack, resolve
from lowtide.units import format_bytes

RANK = 16
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Bytes = dict[str, list[int]]


def opened(name: str, trained: str) -> tuple[Target, list[ResolvedStack]]:
    target = open_target(name, "real", device="cuda", dtype=torch.bfloat16, folder_inputs="real")
    model = target.model.train().to("cuda")
    stacks = resolve(model, target.family.stacks if target.family else None)
    if trained == "full":
        for weight in model.parameters():
            weight.data = weight.data.float()
    else:
        model.requires_grad_(False)
        with torch.device("cuda"):
            add_lora(model, stacks, RANK, torch.float32)
    return target, stacks


def forecast_bytes(name: str, trained: str, sizes: Mapping[str, int]) -> Bytes:
    return plain_bytes(Wish(name, 2**50, find_card("H200"), sizes, rank=RANK if trained == "lora" else None))


def probed_bytes(name: str, trained: str, sizes: Mapping[str, int]) -> Bytes:
    target, stacks = opened(name, trained)
    inputs = target.inputs(torch.bfloat16, over=sizes, device="cuda")
    device = torch.device("cuda")

    def step() -> None:
        target.model.zero_grad(set_to_none=True)
        with sdpa_kernel(KERNELS), torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(target.model(**inputs))
        loss.backward()

    step()  # what comes once: tables of positions, cuBLAS's workspace
    probe = StepProbe(stacks, device, meter_of(device), each=True).start()
    step()
    seen = probe.stop()
    assert seen is not None
    return {
        stack.name: [seen.memory[stack.name, index].kept_bytes for index in range(len(stack.blocks))]
        for stack in stacks
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", help="a family, with sizes as in wan21_1_3b:FR=33,H=480")
    parser.add_argument("--trained", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    for work in options.works:
        name, _, text = work.partition(":")
        sizes = {key: int(value) for key, _, value in (pair.partition("=") for pair in filter(None, text.split(",")))}
        for trained in options.trained:
            line: dict[str, Any] = {"work": name, "sizes": sizes, "trained": trained, **provenance("cuda")}
            foreseen = forecast_bytes(name, trained, sizes)
            try:
                found = probed_bytes(name, trained, sizes)
            except torch.OutOfMemoryError as error:
                print(f"{work}, {trained}: {error}")
                continue
            finally:
                torch.cuda.empty_cache()
            line |= {"forecast_bytes": foreseen, "probed_bytes": found}
            said, is_so = (sum(map(sum, each.values())) for each in (foreseen, found))
            told = f"{format_bytes(is_so)} kept, forecast {format_bytes(said)}, {said / is_so - 1:+.2%}"
            print(f"{work}, {trained}: {told}", flush=True)
            if options.save is not None:
                with options.save.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
