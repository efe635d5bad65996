"""The engine on a CUDA card: device threads, streams and random state. Collected only where there is one."""

import contextlib
import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import families
from lowtide.measure.build import build_model
from lowtide.measure.inputs import build_inputs
from lowtide.measure.parity import loss_of
from lowtide.runtime.entry_points import TORCHS
from lowtide.runtime.kernel_arguments import adds_mask
from tests.runtime.attention import attach
from tests.runtime.toys import Block, Chain, step

pytestmark = [
    # torch's own, of kernels that it chooses: a norm in float32 whose input autocast has made bfloat16, and the first
    # product of a process in its backward
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning"),
]
SETTINGS: list[dict[str, Any]] = [
    {"backend": "torch"},
    {"backend": "torch", "interval": 2},
    {"backend": "torch", "interval": 2, "segment_stride": 4},
    {"backend": "torch-ffn"},
]


def to_card(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: to_card(item) for key, item in value.items()}
    return type(value)(map(to_card, value)) if isinstance(value, (tuple, list)) else value


def gradients(model: nn.Module, inputs: dict[str, Any], autocast: bool, exact: bool) -> dict[str, torch.Tensor]:
    """exact: by deterministic kernels alone; raises RuntimeError where an operator has none."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    # cuDNN's backward is wrong on Flux's joint attention (benchmarks/LOG.md): plain runs differ without bound there.
    trusted = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    torch.use_deterministic_algorithms(exact)
    try:
        with sdpa_kernel(trusted), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(**inputs)
        loss_of(to_cpu(output)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_runs(model: nn.Module, inputs: dict[str, Any], autocast: bool) -> tuple[list[dict[str, torch.Tensor]], bool]:
    """Two that are equal, or some that show how far they differ; and whether they are exact."""
    try:
        return [gradients(model, inputs, autocast, True) for _ in range(2)], True
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return [gradients(model, inputs, autocast, False) for _ in range(8)], False


def to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    return type(value)(map(to_cpu, value)) if isinstance(value, (tuple, list)) else value


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one is finite (tiny random weights overflow under autocast)."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    return float((a - b).nan_to_num(0.0, 0.0, 0.0).abs().max())


@pytest.mark.parametrize("key", [family.key for family in families.all_families()])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_within_what_plain_runs_differ_by(key: str, autocast: bool) -> None:
    family = families.find(key)
    model = build_model(family, "tiny").cuda()
    inputs = to_card(build_inputs(family.tiny, torch.float32))
    plain, exact = plain_runs(model, inputs, autocast)
    spread = {name: max(difference(plain[0][name], other[name]) for other in plain[1:]) for name in plain[0]}
    for setting in SETTINGS:
        with lowtide.attach(model, **setting) as handle:
            found = gradients(model, inputs, autocast, exact)
            totals = handle.receipt().totals
        assert found.keys() == plain[0].keys()
        for name, grad in found.items():
            nearest = min(difference(grad, other[name]) for other in plain)
            assert nearest <= spread[name], (setting, name, nearest, spread[name])
        treated = sum(block.treatment != "kept" for block in handle.receipt().blocks)
        calls = totals["recompute_calls"]  # a block may have two feed-forwards, or one for two streams (CogView4)
        assert calls >= treated > 0 if setting["backend"] == "torch-ffn" else calls == treated > 0


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_dropout_and_glue_draw_the_same_numbers(interval: int) -> None:
    torch.manual_seed(0)
    glue = lambda index, x: x * (1 + torch.rand((), device="cuda"))  # noqa: E731
    model = Chain([Block(dropout=0.4) for _ in range(4)], glue).cuda()
    x = torch.randn(6, 16, device="cuda")
    plain = step(model, lambda: model(x))
    following = torch.rand(3, device="cuda")
    with lowtide.attach(model, interval=interval) as handle:
        ours = step(model, lambda: model(x))
        assert torch.equal(torch.rand(3, device="cuda"), following)
        assert handle.receipt().totals["recompute_calls"] == 4
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name  # type: ignore[arg-type]


def test_peak_is_at_most_torchs_and_nothing_is_left() -> None:
    torch.manual_seed(0)
    ours = Chain([Block(1024) for _ in range(8)]).cuda()

    class Checkpointed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            return x

    torchs = Checkpointed([copy.deepcopy(block) for block in ours.blocks])
    x = torch.randn(8192, 1024, device="cuda")

    def peak(model: nn.Module) -> int:
        for _ in range(2):
            model(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        assert torch.cuda.memory_allocated() <= before + 2**20
        return torch.cuda.max_memory_allocated() - before

    reference = peak(torchs)
    del torchs
    peaks = {}
    for interval in (1, 2, 4):
        with lowtide.attach(ours, interval=interval):
            peaks[interval] = peak(ours)
    assert peaks[1] <= reference
    assert peaks[1] < peaks[2] < peaks[4]


def test_backward_on_a_side_stream() -> None:
    torch.manual_seed(0)
    model, x = Chain([Block(256) for _ in range(4)]).cuda(), torch.randn(512, 256, device="cuda")
    plain = step(model, lambda: model(x))
    stream = torch.cuda.Stream()
    with lowtide.attach(model, interval=2):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ours = step(model, lambda: model(x))
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name  # type: ignore[arg-type]


FIRST_STEP = """
import torch
import lowtide
from lowtide.bench.synthetic import Synthetic

torch.manual_seed(0)
model = Synthetic(3, 256, 4).to("cuda", torch.bfloat16)
x = torch.randn(1, 256, 256, device="cuda", dtype=torch.bfloat16)
before = torch._C._get_sdp_priority_order()
with lowtide.attach(model, backend=BACKEND) as handle:
    model(x).sum().backward()
    assert handle.receipt().totals["recompute_calls"] == 3
print("order decided late:", before != torch._C._get_sdp_priority_order())
"""


@pytest.mark.parametrize("backend", ["torch", "torch-selective", "unsloth"])
def test_the_first_attention_of_a_process_is_recomputed_by_the_same_kernel(backend: str) -> None:
    """torch decides its order of attention kernels when it is first asked: a process of its own, no kernel named."""
    code = f"BACKEND = {backend!r}\n{FIRST_STEP}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)


class Masked(nn.Module):
    """Attention with a mask for every pair of tokens."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = self.mask.logical_not().logical_not()  # made here, as models do: of what outlives the call it is kept
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


BLOCKS, HEADS, WIDTH = 4, 4, 256


@pytest.mark.parametrize("tokens", [1021, 1024])
@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, None])
def test_selective_makes_additive_masks_again_and_calls_the_same_kernel(kernel: SDPBackend | None, tokens: int) -> None:
    torch.manual_seed(0)
    mask = torch.rand(1, 1, tokens, tokens, device="cuda") > 0.3
    mask[..., 0] = True
    model = Chain([Masked(mask) for _ in range(BLOCKS)]).to("cuda", torch.bfloat16)
    x = torch.randn(1, tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
            plain = step(model, lambda: model(x))
            with attach(model) as handle:
                ours = step(model, lambda: model(x))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name  # type: ignore[arg-type]
    receipt = handle.receipt()
    assert receipt.totals["recompute_calls"] == BLOCKS
    if kernel is SDPBackend.EFFICIENT_ATTENTION:
        assert receipt.fallbacks == ()
        assert max(block.kept_bytes for block in receipt.blocks) < mask.numel() * 2, "the mask in bfloat16 is larger"


def test_cudnn_s_attention_is_given_the_boolean_mask() -> None:
    q = torch.randn(1, HEADS, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert not adds_mask(TORCHS, (q, q, q, mask), {})
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert adds_mask(TORCHS, (q, q, q, mask), {})
