"""Shares and gaps of hand-made lists of events, and what kernels' names say."""

import pytest

from lowtide.bench.timeline import ATTENTION, COPY, GEMM, OTHER, Gap, kind_of, timeline

GEMM_NAME, FLASH, NORM, OUT = "sm90_xmma_gemm_bf16", "flash_fwd_kernel", "layer_norm", "Memcpy DtoH (Device -> Pinned)"


def test_shares_of_kernels_one_after_another() -> None:
    found = timeline([(GEMM_NAME, 100, 140), (FLASH, 140, 150), (NORM, 160, 170), (GEMM_NAME, 190, 200)])
    assert found.running == pytest.approx(0.7)
    assert found.copying == 0
    assert found.gemm == pytest.approx(50 / 70)
    assert found.attention == pytest.approx(10 / 70)
    assert found.gap == Gap(20, NORM, GEMM_NAME)
    assert found.top == (
        (GEMM_NAME, pytest.approx(50 / 70)),
        (FLASH, pytest.approx(1 / 7)),
        (NORM, pytest.approx(1 / 7)),
    )


def test_overlap_counts_once_in_the_window_and_fully_in_kernel_time() -> None:
    found = timeline([(NORM, 40, 60), (GEMM_NAME, 0, 80), (FLASH, 70, 100)])
    assert found.running == 1
    assert found.gemm == pytest.approx(80 / 130)
    assert found.gap is None


def test_a_gap_follows_the_kernel_that_ended_last() -> None:
    found = timeline([("long", 0, 50), ("short", 10, 20), ("next", 55, 60), ("last", 62, 63)])
    assert found.gap == Gap(5, "long", "next")


def test_copies_run_beside_kernels_and_fill_no_gap() -> None:
    found = timeline([(GEMM_NAME, 0, 40), (OUT, 20, 90), (OUT, 80, 100), (NORM, 100, 200)])
    assert found.running == pytest.approx(0.7)
    assert found.copying == pytest.approx(0.4)
    assert found.gemm == pytest.approx(40 / 140)
    assert found.gap == Gap(60, GEMM_NAME, NORM)
    assert [name for name, _ in found.top] == [NORM, GEMM_NAME]


def test_a_copy_at_the_edge_belongs_to_the_window() -> None:
    assert timeline([(OUT, 0, 10), (NORM, 10, 15), (OUT, 15, 20)]).running == pytest.approx(0.25)


def test_ten_kernels_at_most() -> None:
    found = timeline((f"kernel {number}", 100 * number, 101 * number) for number in range(1, 15))
    assert [name for name, _ in found.top] == [f"kernel {number}" for number in range(14, 4, -1)]


@pytest.mark.parametrize("events", [[], [(OUT, 0, 5)], [(NORM, 5, 5)]])
def test_nothing_that_ran(events: list[tuple[str, float, float]]) -> None:
    with pytest.raises(ValueError, match="no kernel took any time"):
        timeline(events)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNN", GEMM),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_nn_align8>(...)", GEMM),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_MT128x128x32", GEMM),
        ("triton_tem_fused_addmm_0", GEMM),
        ("aten::addmm", GEMM),
        ("aten::bmm", GEMM),
        ("aten::mul", OTHER),
        ("aten::sum", OTHER),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", ATTENTION),
        ("fmha_cutlassB_bf16_aligned_128x64_k128_sm80(...)", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("triton_poi_fused__scaled_dot_product_flash_attention_view_3", OTHER),
        ("triton_per_fused_addmm_native_layer_norm_1", OTHER),
        ("Memcpy HtoD (Pinned -> Device)", COPY),
        ("Memset (Device)", COPY),
        ("CopyDeviceToHost", COPY),
        ("aten::copy_", COPY),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>", OTHER),
    ],
)
def test_what_a_name_says(name: str, kind: str) -> None:
    assert kind_of(name) == kind
