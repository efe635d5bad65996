"""A receipt as people read it."""

import io
from typing import Any

from rich.console import Console

from lowtide.cli.receipt_table import receipt_table


def block(index: int, treatment: str, segment: int | None = None, reason: str | None = None) -> dict[str, Any]:
    return {
        "name": f"blocks.{index}",
        "stack": "blocks",
        "index": index,
        "treatment": treatment,
        "segment": segment,
        "reason": reason,
        "recompute_calls": int(not treatment.startswith("kept")),
        "kept_bytes": 1024,
        "cpu_bytes": 512 if treatment.endswith("+offload") else 0,
        "recomputed_bytes": 2048 if not treatment.startswith("kept") else 0,
    }


def receipt(blocks: list[dict[str, Any]], **notes: Any) -> dict[str, Any]:
    keys = ("recompute_calls", "kept_bytes", "cpu_bytes", "recomputed_bytes")
    totals = {key: sum(item[key] for item in blocks) for key in keys}
    totals |= notes.pop("copies", {})
    return {"blocks": blocks, "totals": totals, "inert": [], "ignored": [], "fallbacks": [], **notes}


def rows_of(content: dict[str, Any], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(receipt_table(content))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_like_blocks_share_a_row_and_sums_are_sums() -> None:
    whole = [block(i, "whole", segment=i // 2) for i in range(5)]
    rows = rows_of(receipt([*whole, block(5, "ffn"), block(6, "kept", reason="no [bold]side"), block(7, "kept")]))
    assert "blocks 8 blocks" in rows
    assert "0-1, 2-3 (4) recomputed, 2 as one 4 4.00 KiB 8.00 KiB" in rows
    assert "4 (1) recomputed 1 1.00 KiB 2.00 KiB" in rows
    assert "5 (1) ffn recomputed 1 1.00 KiB 2.00 KiB" in rows
    assert "6 (1) kept: no [bold]side 0 1.00 KiB 0 B" in rows
    assert "7 (1) kept 0 1.00 KiB 0 B" in rows
    assert "all 8 blocks 6 8.00 KiB 12.0 KiB" in rows


COPIES = {"d2h_bytes": 2048, "h2d_bytes": 1536, "hidden_copy_ms": 12.34, "exposed_copy_ms": 0.5, "prefetch_misses": 3}


def pool(**changed: int) -> dict[str, int]:
    usual = {"pinned_bytes": 4096, "pageable_bytes": 0, "in_use_bytes": 0, "buffers": 4, "sizes": 2, "fallbacks": 0}
    return usual | changed


def test_what_was_moved_has_a_column_and_its_times() -> None:
    blocks = [block(0, "ffn+offload"), block(1, "ffn+offload"), block(2, "kept+offload"), block(3, "selective")]
    rows = rows_of(receipt(blocks, copies={**COPIES, "pool": pool()}))
    assert "blocks treatment replays kept on CPU dropped" in rows
    assert "0-1 (2) ffn recomputed 2 2.00 KiB 1.00 KiB 4.00 KiB" in rows
    assert "2 (1) kept 0 1.00 KiB 512 B 0 B" in rows
    assert "3 (1) selective 1 1.00 KiB 0 B 2.00 KiB" in rows
    assert "all 4 blocks 3 4.00 KiB 1.50 KiB 6.00 KiB" in rows
    assert rows[-3:] == [
        "copies: 2.00 KiB out, 1.50 KiB back; 12.3 ms hidden, 0.5 ms exposed",
        "prefetch misses: 3",
        "pool: 4.00 KiB pinned, 0 B not pinned; buffers 4, distinct sizes 2",
    ]


def test_a_pool_that_fell_back_says_so() -> None:
    rows = rows_of(receipt([block(0, "kept+offload")], copies={**COPIES, "pool": pool(fallbacks=5)}), width=120)
    assert rows[-1].endswith("distinct sizes 2, fallbacks to ordinary memory 5")


def test_where_nothing_was_moved_there_is_no_word_of_it() -> None:
    copies = dict.fromkeys(COPIES, 0) | {"pool": {}}
    assert rows_of(receipt([block(0, "whole", 0)], copies=copies)) == rows_of(receipt([block(0, "whole", 0)]))


def test_blocks_that_move_and_blocks_that_do_not_are_apart() -> None:
    rows = rows_of(receipt([block(0, "kept+offload"), block(1, "kept")], copies={**COPIES, "pool": pool()}))
    assert "0 (1) kept 0 1.00 KiB 512 B 0 B" in rows
    assert "1 (1) kept 0 1.00 KiB 0 B 0 B" in rows


def test_many_spans_are_shortened_but_counted() -> None:
    rows = rows_of(receipt([block(i, "ffn" if i % 3 == 0 else "kept") for i in range(31)]))
    assert any(row.startswith("0, 3 … 30 (11) ffn recomputed 11 ") for row in rows)


def test_what_did_not_run_as_asked_is_told_once_a_reason() -> None:
    content = receipt(
        [block(i, "whole", segment=i) for i in range(5)],
        inert=[{"option": "interval", "reason": "no segment held more than one block"}],
        ignored=[{"option": "segment_stride", "reason": "this model never can"}],
        fallbacks=[
            *({"block": f"blocks.{i}", "reason": "the carry is new"} for i in range(4)),
            {"block": "blocks.4", "reason": "opaque argument [cache]"},
        ],
        warnings=["never called"],
    )
    rows = rows_of(content, width=120)
    assert rows[-5:] == [
        "inert: interval: no segment held more than one block",
        "ignored: segment_stride: this model never can",
        "fallback at blocks.0, blocks.1 … blocks.3 (4 blocks): the carry is new",
        "fallback at blocks.4: opaque argument [cache]",
        "warning: never called",
    ]


def test_a_long_list_of_reasons_is_cut_and_says_so() -> None:
    fallbacks = [{"block": f"blocks.{i}", "reason": f"shape ({i},) is new"} for i in range(9)]
    rows = rows_of(receipt([block(i, "whole", segment=i) for i in range(9)], fallbacks=fallbacks))
    assert sum("is new" in row for row in rows) == 5
    assert rows[-1] == "fallback: 4 more reasons are in the receipt"
