import torch
from torch import nn

from _common import Block, Case, ck_variants

c = Case(
    83,
    "the offload wrapper leaves the last block's output (or an extra tensor) on the CPU; the next plain layer is on the GPU",
    "kohya-ss/musubi-tuner#867 #871 #903 #1038 #654",
    "outputs are on the device where the block computed, also for the last block, second outputs, and inputs that came in on the host",
)
if not torch.cuda.is_available():
    c.note("needs an accelerator: run with CUDA; the CPU run only checks identity of devices")
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
bs = nn.ModuleList(Block() for _ in range(2)).to(dev)
head = nn.Linear(32, 4).to(dev)
x = torch.randn(1, 8, 32, device=dev)
for name, ck in ck_variants("stock-nonreentrant"):

    def r():
        h = x
        for b in bs:
            h = ck(b, h)
            assert h.device == x.device, f"block output on {h.device}"
        head(h).mean().backward()
        return True, f"on {dev}"

    c.try_(name, r)
c.end()
