from torch.utils.checkpoint import checkpoint as tck

from _common import ADAPTER, Case, add_lora, flux_inputs, tiny_flux

c = Case(
    11,
    "only one of several block lists is checkpointed (double blocks yes, single blocks no)",
    "Tencent-Hunyuan/HunyuanVideo-1.5#54",
    "every repeated block list of the family is covered; the library can print which are and are not",
)
m = add_lora(tiny_flux(3, 5))
seen = []


def counting(module, *a):
    seen.append(type(module).__name__)
    return tck(module.__call__, *a, use_reentrant=False)


m.enable_gradient_checkpointing(counting)
m.train()
m(**flux_inputs())[0].mean().backward()
import collections

cnt = collections.Counter(seen)
c.row("stock flux", len(seen) == 8, dict(cnt))
if ADAPTER is not None and hasattr(ADAPTER, "describe"):
    m2 = add_lora(tiny_flux(3, 5))
    ADAPTER.enable(m2)
    c.row("adapter[describe]", True, ADAPTER.describe(m2))
c.end()
