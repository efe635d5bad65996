import gc

import torch

from _common import Case, ck_variants

c = Case(
    71,
    "checkpoint debug=True leaks",
    "facebookresearch/fairseq2 PR#474",
    "the library's debug/verify mode frees everything after backward",
)


def live():
    return sum(isinstance(o, torch.Tensor) and o.numel() == 2048 for o in gc.get_objects())


for name, ck in ck_variants("stock-nonreentrant"):
    for debug in (False, True):
        gc.collect()
        gc.disable()
        b0 = live()
        for _ in range(4):
            ck(lambda a: torch.sin(a) * a, torch.randn(2048, requires_grad=True), debug=debug).sum().backward()
        n = live() - b0
        gc.enable()
        gc.collect()
        n2 = live() - b0
        c.row(name, n <= 1, f"debug={debug}: {n} alive without gc, {n2} after gc")
c.end()
