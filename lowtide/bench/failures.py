"""Failures that are not a mode's: the work fails in the same condition where lowtide is not attached, too."""

from collections.abc import Iterator

from lowtide.bench.outcome import Outcome
from lowtide.bench.report import Column, Matrix

WITHOUT_LOWTIDE = "fails without lowtide, too"
CUDNN = "torch 2.11's cuDNN attention fails on joint attention: see cells with no-cudnn"
_TORCH = "2.11."
_HOPPER = ("H20", "H100", "H200", "H800", "GH200")
_CUDA_ERROR = "CUDA error"


def failures(matrix: Matrix) -> Iterator[str]:
    """A line for each column in which mode none failed and another did: ``"LoRA 4: fails without lowtide, too."``"""
    for column in matrix.columns:
        failed = {cell.mode: cell.outcome for cell in column.cells if cell.outcome and cell.state == "failed"}
        if "none" in failed and len(failed) > 1:
            where = f"{column.title}: " if len(matrix.columns) > 1 else ""
            yield f"{where}{WITHOUT_LOWTIDE}{f'; {CUDNN}' if _by_cudnn(column, failed['none']) else ''}."


def _by_cudnn(column: Column, none: Outcome) -> bool:
    """Whether torch may have chosen its cuDNN kernel, and what came is a CUDA error."""
    torch = str(none.records[-1].machine.get("torch", ""))
    chosen = column.condition.attention == "default" and column.card.partition(" ")[0] in _HOPPER
    return chosen and torch.startswith(_TORCH) and any(_CUDA_ERROR in reason for reason in none.reasons)
