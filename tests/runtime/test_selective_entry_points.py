"""Where attention is watched: torch's function, diffusers' table of kernels; what else in the process uses them."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.attention_backend import entry_points
from tests.runtime.attention import SDPA, CountsAttention, attach, block, chain, inputs, sdpa_with
from tests.runtime.toys import Chain, assert_equal, step

# ---------------------------------------------------------------------- the process


def test_another_thread_meanwhile_is_not_watched() -> None:
    inside, done = threading.Event(), threading.Event()
    seen: list[torch.Tensor] = []
    q = torch.randn(1, 1, 4, 8, requires_grad=True)

    def other() -> None:
        assert inside.wait(10)
        for _ in range(2):
            seen.append(F.scaled_dot_product_attention(q, q, q))
        done.set()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert F.scaled_dot_product_attention is not SDPA
        inside.set()
        assert done.wait(10)
        return F.scaled_dot_product_attention(q, k, v)

    model = chain(attend)
    thread = threading.Thread(target=other)
    thread.start()
    with attach(model), CountsAttention() as mode:
        step(model, lambda: model(inputs()))
    thread.join()
    assert mode.total == 3
    assert torch.equal(seen[0], SDPA(q, q, q))
    assert seen[0].grad_fn is not None
    assert F.scaled_dot_product_attention is SDPA


def test_two_threads_train_at_once() -> None:
    models = [chain(sdpa_with(is_causal=bool(number))) for number in range(2)]
    plain = [_gradients(model) for model in models]
    results: list[list[torch.Tensor]] = [[], []]
    handles = [attach(model) for model in models]

    def train(number: int) -> None:
        for _ in range(20):
            results[number] = _gradients(models[number])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.detach()
    for expected, found in zip(plain, results, strict=True):
        assert all(map(torch.equal, expected, found))
    assert F.scaled_dot_product_attention is SDPA


def _gradients(model: Chain) -> list[torch.Tensor]:
    model.eval()  # no dropout: the generator is shared
    return list(torch.autograd.grad(model(inputs()).square().sum(), list(model.parameters())))


def test_somebody_elses_attention_in_the_place_is_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def mine(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return SDPA(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    model = chain()
    plain = step(model, lambda: model(inputs()))
    with attach(model):
        assert_equal(plain, step(model, lambda: model(inputs())))
        assert F.scaled_dot_product_attention is mine
    assert len(calls) == 6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_is_recomputed_whole_and_compiled_once() -> None:
    model = chain()
    model.eval()
    plain = step(model, lambda: model(inputs()))
    graphs: list[object] = []

    def backend(graph: Any, example: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    block(model).compile(backend=backend, fullgraph=True)
    with attach(model) as handle:
        for _ in range(3):
            assert_equal(plain, step(model, lambda: model(inputs())))
        receipt = handle.receipt()
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert {note.subject: note.reason for note in receipt.fallbacks} == {
        "blocks.1": "no attention kernel was called in it, so it is recomputed whole"
    }


# ---------------------------------------------------------------------- diffusers' table of kernels


class Kernel(torch.autograd.Function):
    """Attention of a library: saves its arguments, its output and the sums it normalises with."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Kernel.runs += 1
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k)
        lse = logits.logsumexp(-1)
        out = torch.einsum("bhnm,bmhd->bnhd", (logits - lse[..., None]).exp(), v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) - lse[..., None]).exp()
        inner = torch.einsum("bnhd,bmhd->bhnm", grads[0], v) - torch.einsum("bnhd,bnhd->bhn", grads[0], out)[..., None]
        scores = weights * inner
        return (
            torch.einsum("bhnm,bmhd->bnhd", scores, k),
            torch.einsum("bhnm,bnhd->bmhd", scores, q),
            torch.einsum("bhnm,bnhd->bmhd", weights, grads[0]),
        )


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_kernel_of_diffusers_table_is_kept(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    from diffusers.models import attention_dispatch as dispatch

    registry, name = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.SAGE

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out, lse = Kernel.apply(query, key, value)
        F.scaled_dot_product_attention(query, key, value)  # inside another one: it counts as part of it
        return (out, lse) if with_lse else out

    monkeypatch.setitem(registry._backends, name, kernel)
    monkeypatch.setitem(registry._constraints, name, [])
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value"})
    table = dict(registry._backends)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = dispatch.dispatch_attention_fn(q, k, v, backend=name)
        return (out[0] + 0 * out[1].mean() if with_lse else out).transpose(1, 2)

    model = chain(attend)
    plain = step(model, lambda: model(inputs()))
    Kernel.runs = 0
    with attach(model) as handle, CountsAttention() as mode:
        assert_equal(plain, step(model, lambda: model(inputs())))
        assert not handle.receipt().fallbacks
    assert Kernel.runs == mode.total == 3
    assert registry._backends == table


def test_tables_and_functions_are_watched_through_one_entry_point_each() -> None:
    import diffusers.models.attention_dispatch  # noqa: F401

    first, second = entry_points(), entry_points()
    assert [entry.name for entry in first] == ["scaled_dot_product_attention", "_backends"]
    assert all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("region", [nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)])
def test_a_region_with_lowtide_checkpoint_runs_attention_again(region: Callable[[], Any]) -> None:
    model = chain(depth=1)
    with region(), CountsAttention() as mode:
        lowtide.checkpoint(model.blocks[0], inputs()).sum().backward()
    assert mode.total == 2
