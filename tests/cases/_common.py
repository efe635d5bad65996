"""Harness for the bug cases: what public reports describe, as small scripts.

Run one case:   python tests/cases/NN_name.py                               (what stock torch does)
With a library: GC_ADAPTER=lowtide_adapter python tests/cases/NN_name.py
  my_adapter.py may define any of (missing ones are simply not tried):
    checkpoint(fn, *args, backend="torch", **kw)   # drop-in for torch.utils.checkpoint.checkpoint
    offload(**kw)                                  # context manager: saved-tensor offload
    enable(model, backend="torch", interval=1, **kw) / disable(model)
    parse(dict) -> normalised dict, or raises ValueError
    pool_bytes() -> int ; pool_reset()
    parse_switch(value) -> True | False | backend name | None (unset), or raises ValueError
    stats() -> dict of counters of the last step (recompute calls, bytes moved, backend really used)
    schedule(depth, interval, stride=None) -> block indices that are treated
    audit(model) -> names of trainable parameters without gradient ; describe(model) -> what is treated, for people
    plan(...) -> the planner's answer (see case 74) ; live_restored() -> bytes of reloads alive now
    inert(model) -> names of the options that changed nothing in the last step
    offloaded(depth, interval) -> indices of blocks whose inputs wait in CPU memory with the backend "unsloth"
    pool_takes(bytes) -> bytes of CPU memory that a tensor of that size takes ; pool_under(limit_bytes, sizes) ->
        (pinned bytes, pageable bytes, warnings) after taking buffers of these sizes on a machine with so much memory
  ADAPTER_BACKENDS="torch,unsloth,..." chooses the checkpoint backends that are tried (default torch,unsloth).
  CASES_ROWS=adapter leaves out the rows of stock torch that are made per variant, to save time.

Every row:  <variant>  PASS|FAIL  <detail>.   Rows named "naive-*" are small stand-ins, written here,
for the shape of code that the cited reports describe; they show what a careless library would do.
With an adapter the exit code is 1 when one of its rows FAILs; without one it is always 0.
"""

import contextlib
import importlib
import os
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as tck

torch.set_num_threads(1)

ADAPTER = None
if os.environ.get("GC_ADAPTER"):
    sys.path.insert(0, os.getcwd())
    ADAPTER = importlib.import_module(os.environ["GC_ADAPTER"])
BACKENDS = os.environ.get("ADAPTER_BACKENDS", "torch,unsloth").split(",")
WITH_STOCK = os.environ.get("CASES_ROWS") != "adapter"


# ---------- checkpoint variants ----------
def plain(fn, *a, **k):
    return fn(*a, **k)


def nonreentrant(fn, *a, **k):
    return tck(fn, *a, use_reentrant=False, **k)


def reentrant(fn, *a, **k):
    return tck(fn, *a, use_reentrant=True, **k)


class _NaiveOffload(torch.autograd.Function):
    """A minimal hand-written checkpoint that keeps a copy of the hidden state (stand-in, not a recommendation)."""

    @staticmethod
    def forward(ctx, fn, hidden, *rest):
        with torch.no_grad():
            out = fn(hidden, *rest)
        ctx.save_for_backward(hidden.detach().clone())
        ctx.fn, ctx.rest = fn, rest
        return out

    @staticmethod
    def backward(ctx, *g):
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.fn(h, *ctx.rest)
        torch.autograd.backward(out, g if isinstance(out, tuple) else g[0])
        return (None, h.grad) + (None,) * len(ctx.rest)


def naive_offload(fn, hidden, *rest):
    return _NaiveOffload.apply(fn, hidden, *rest)


def ck_variants(*names):
    table = {
        "plain": plain,
        "stock-nonreentrant": nonreentrant,
        "stock-reentrant": reentrant,
        "naive-offload": naive_offload,
    }
    out = [(n, table[n]) for n in names if WITH_STOCK or n == "plain"]
    if ADAPTER is not None and hasattr(ADAPTER, "checkpoint"):
        for b in BACKENDS:
            out.append((f"adapter[{b}]", lambda fn, *a, _b=b, **k: ADAPTER.checkpoint(fn, *a, backend=_b, **k)))
    return out


# ---------- offload variants ----------
EXTRA_OFFLOADS = {}


@contextlib.contextmanager
def copy_offload():
    """torch's save_on_cpu(pin_memory=True) algorithm with the pinning left out, so that it really
    copies even when compute is on the CPU."""

    def pack(t):
        buf = torch.empty(t.size(), dtype=t.dtype, layout=t.layout)
        buf.copy_(t)
        return (t.device, buf)

    def unpack(p):
        d, b = p
        return b.to(d, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def off_variants(*names):
    table = {
        "plain": contextlib.nullcontext,
        "stock-save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
        "stock-copy_offload": copy_offload,
        **EXTRA_OFFLOADS,
    }
    out = [(n, table[n]) for n in names]
    if ADAPTER is not None and hasattr(ADAPTER, "offload"):
        out.append(("adapter[offload]", ADAPTER.offload))
    return out


# ---------- small model parts ----------
class LoRALinear(nn.Module):
    def __init__(self, i, o, r=4, bias=True, dropout=0.0, scale=1.0):
        super().__init__()
        self.base = nn.Linear(i, o, bias=bias).requires_grad_(False)
        self.lora_A = nn.Linear(i, r, bias=False)
        self.lora_B = nn.Linear(r, o, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)
        self.drop = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_B(self.lora_A(self.drop(x)))


class Block(nn.Module):
    """tiny pre-norm attention + feed-forward block, LoRA on q and ff."""

    def __init__(self, d=32, heads=2, dropout=0.0):
        super().__init__()
        self.h = heads
        self.n1 = nn.LayerNorm(d, elementwise_affine=False)
        self.n2 = nn.LayerNorm(d, elementwise_affine=False)
        self.q = LoRALinear(d, d, dropout=dropout)
        self.k = nn.Linear(d, d).requires_grad_(False)
        self.v = nn.Linear(d, d).requires_grad_(False)
        self.o = nn.Linear(d, d).requires_grad_(False)
        self.ff1 = LoRALinear(d, 4 * d, dropout=dropout)
        self.ff2 = nn.Linear(4 * d, d).requires_grad_(False)

    def forward(self, x):
        B, S, D = x.shape
        y = self.n1(x)
        q, k, v = (m(y).view(B, S, self.h, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, D))
        return x + self.ff2(F.gelu(self.ff1(self.n2(x))))


def grads(module):
    return {
        n: (None if p.grad is None else p.grad.detach().clone())
        for n, p in module.named_parameters()
        if p.requires_grad
    }


def same(a, b, tol=1e-5):
    for n in a:
        x, y = a[n], b[n]
        if (x is None) != (y is None):
            return False, f"{n}: {'None' if x is None else 'grad'} vs {'None' if y is None else 'grad'}"
        if x is not None and not torch.allclose(x.float(), y.float(), atol=tol, rtol=1e-3):
            return False, f"{n}: max diff {(x.float() - y.float()).abs().max():.3g} (ref max {x.abs().max():.3g})"
    return True, "gradients equal to the plain run"


def zero(m):
    for p in m.parameters():
        p.grad = None


# ---------- reporting ----------
class Case:
    def __init__(self, nn_, title, source, right):
        self.bad = 0
        print(
            f"CASE {nn_}  {title}\n  source: {source}\n  right : {right}\n  torch {torch.__version__}  adapter={os.environ.get('GC_ADAPTER', '-')}"
        )

    def row(self, label, ok, detail=""):
        print(f"  {label:<28s} {'PASS' if ok else 'FAIL'}  {detail}")
        if label.startswith("adapter") and not ok:
            self.bad += 1

    def note(self, s):
        print("  note  :", s)

    def try_(self, label, fn):
        """fn() -> (ok, detail); an exception is a FAIL with its first line."""
        try:
            ok, d = fn()
        except Exception as e:
            ok, d = False, f"{type(e).__name__}: {str(e).strip().splitlines()[0][:170] if str(e).strip() else ''}"
        self.row(label, ok, d)
        return ok

    def raises(self, label, fn, want, needle=""):
        """the right thing is a clear error of type want whose text has needle."""
        try:
            r = fn()
            self.row(label, False, f"no error, returned {str(r)[:80]}")
        except want as e:
            self.row(label, needle.lower() in str(e).lower(), f"{type(e).__name__}: {str(e).splitlines()[0][:150]}")
        except Exception as e:
            self.row(label, False, f"other {type(e).__name__}: {str(e).splitlines()[0][:150]}")

    def equal_or_loud(self, label, fn):
        """equal gradients, or a RuntimeError/ValueError (loud): both PASS; silently other numbers: FAIL."""
        try:
            ok, d = fn()
        except (RuntimeError, ValueError) as e:
            ok, d = True, f"loud {type(e).__name__}: {str(e).strip().splitlines()[0][:120]}"
        except Exception as e:
            ok, d = False, f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
        self.row(label, ok, d)

    def end(self):
        sys.exit(1 if (ADAPTER is not None and self.bad) else 0)


def tiny_flux(layers=2, single=2):
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=single,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=False,
    )


def flux_inputs(b=1, s=16, t=8):
    g = torch.Generator().manual_seed(1)
    r = lambda *k: torch.randn(*k, generator=g)
    return {
        "hidden_states": r(b, s, 4),
        "encoder_hidden_states": r(b, t, 32),
        "pooled_projections": r(b, 32),
        "timestep": torch.tensor([0.5] * b),
        "img_ids": torch.zeros(s, 3),
        "txt_ids": torch.zeros(t, 3),
        "return_dict": False,
    }


def add_lora(model, names=("to_q",), r=4, dropout=0.0, adapter="default"):
    from peft import LoraConfig

    torch.manual_seed(3)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=r, lora_alpha=r, target_modules=list(names), lora_dropout=dropout, init_lora_weights=False),
        adapter_name=adapter,
    )
    return model
