"""``lowtide bench host``, ``attention`` and ``profile``: measurements that are no cells of a sweep."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lowtide import families
from lowtide.cli import bench_common
from lowtide.cli.bench_common import checked, device_for, libraries, most_parameters
from lowtide.cli.options import AsJson, Sizes, sizes_of
from lowtide.cli.output import say, show, show_json, working
from lowtide.errors import ConfigError, MachineError
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.bench.attention_table import KernelRow
    from lowtide.bench.host import HostCost
    from lowtide.bench.record import Condition
    from lowtide.bench.timeline import Timeline

HOST_NOTE = (
    "added: over plain; it contains the block's second forward. of torch's: of what torch's checkpoint adds. "
    "lag: how much later the device was done."
)
ATTENTION_NOTE = (
    "cosine: of the LoRA gradients, all flattened together, to those of the same model in float32 with the math "
    "kernel. It is a numerical diagnostic: what all rows share is how the model rounds in bfloat16, what they differ "
    "by is the kernel. It says nothing about image quality."
)
PROFILE_NOTE = (
    "Shares under a profiler, which slows a step: no throughput figures. `lowtide bench synthetic` and `bench family` "
    "measure seconds a step."
)

Device = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the blocks run; CPU time is measured on both.")]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Rounds in which all rows take turns.")]
Depth = Annotated[int, typer.Option(metavar="N", min=2, help="Blocks in the stack.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Append the results there, as lines of JSON.")]
Family = Annotated[str, typer.Argument(metavar="FAMILY", help="A family (`lowtide families` lists them).")]
Work = Annotated[str, typer.Argument(metavar="WORK|FAMILY", help="A synthetic work, as 16x4096, or a family.")]
Mode = Annotated[str, typer.Option(metavar="MODE", help="One of the modes that cells have. docs/bench.md.")]
Adapter = Annotated[str, typer.Option(metavar="NAME", help="What is trained: lora, full, or frozen (synthetic works).")]


def host(
    device: Device = "cpu", rounds: Rounds = 100, depth: Depth = 16, out: Out = None, json: AsJson = False
) -> None:
    """Measure what each way of recomputing costs the CPU: microseconds a block, beside torch's own checkpoint."""
    with working():
        with libraries():
            from lowtide.bench.host import host_costs
            from lowtide.bench.lines import append_line
            from lowtide.bench.provenance import provenance
        _check_device(device)
        # A bar with the time left would redraw itself from a thread of its own, whose CPU time is this process's too.
        found = host_costs(device, rounds, depth, lambda title: say(f"{title}: {rounds} rounds …"))
        results = {title: [asdict(cost) for cost in costs] for title, costs in found.items()}
        facts = {**provenance(device), "tool": "host", "threads": 1, "device": device, "rounds": rounds, "depth": depth}
        if out is not None:
            append_line(out / "host.jsonl", {**facts, "results": results})
    if json:
        show_json({**facts, "results": results})
    else:
        show(*_host_in_words(found))


def attention(
    family: Family,
    mode: Mode = "layer",
    rank: bench_common.Rank = 16,
    sizes: Sizes = None,
    largest: bench_common.Largest = "10e9",
    size: bench_common.Size = "real",
    warm_up: bench_common.WarmUp = 5,
    steps: bench_common.Steps = 10,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure attention kernels: seconds a step, peak memory, and how near the gradients come to float32's."""
    with working():
        with libraries():
            from lowtide.bench.attention_table import KERNEL_NAMES
        base = _family_condition(family, mode, sizes, largest, size=size, rank=rank)
        conditions = [checked(replace(base, attention=kernel)) for kernel in KERNEL_NAMES]
        rows = list(_kernel_rows(conditions, warm_up, steps, out))
    if json:
        show_json({"family": base.work, "note": ATTENTION_NOTE, "kernels": [row.as_dict() for row in rows]})
    else:
        show(*_kernels_in_words(rows), "", ATTENTION_NOTE)


def profile(
    work: Work,
    mode: Mode = "layer",
    adapter: Adapter = "lora",
    rank: bench_common.Rank = 16,
    precision: bench_common.Precision = "bf16",
    compile: bench_common.Compile = "off",
    attention: bench_common.Attention = "default",
    sizes: Sizes = None,
    largest: bench_common.Largest = "10e9",
    size: bench_common.Size = "real",
    warm_up: bench_common.WarmUp = 3,
    steps: bench_common.Steps = 3,
    json: AsJson = False,
) -> None:
    """Show where a step's time goes on the device: shares of kernels and copies, and the largest gap."""
    with working():
        with libraries():
            from lowtide.bench.profile import profiled
        common = {"precision": precision, "compile": compile, "attention": attention, "size": size}
        trained = {"adapter": adapter, "rank": rank if adapter == "lora" else None}
        condition = checked(_condition(work, mode, sizes, largest, **common, **trained))
        device = device_for([condition])
        found = profiled(condition, device, warm_up, steps)
    seen = "CPU operators (there are no kernels on a CPU)" if device == "cpu" else f"kernels on {device}"
    if json:
        facts = {"work": condition.work, "mode": mode, "steps": steps, "events": seen, "note": PROFILE_NOTE}
        show_json({**facts, **asdict(found)})
    else:
        show(
            f"{condition.work}, {mode}: {steps} steps; events: {seen}.", "", *_profile_in_words(found), "", PROFILE_NOTE
        )


def _check_device(device: str) -> None:
    import torch

    from lowtide.bench.host import DEVICES

    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is not allowed; allowed: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise MachineError("there is no CUDA device; --device cpu measures on any machine")


def _condition(work: str, mode: str, sizes: list[str] | None, largest: str, **common: Any) -> "Condition":
    """Of a synthetic work or a family. Raises ConfigError for what is neither."""
    from lowtide.bench.describe import synthetic_shape
    from lowtide.bench.record import Condition

    if synthetic_shape(work) is None:
        if not families.known(work):
            raise ConfigError(f"{families.unknown(work)}. A synthetic work is BLOCKSxTOKENS, as in 16x4096")
        return _family_condition(work, mode, sizes, largest, **common)
    if sizes:
        raise ConfigError("--set sizes the inputs of a family; a synthetic work says its size itself: BLOCKSxTOKENS")
    return Condition("synthetic", work, mode, **common)


def _family_condition(family: str, mode: str, sizes: list[str] | None, largest: str, **common: Any) -> "Condition":
    from lowtide.bench.sweep import family_conditions

    return next(family_conditions([family], [mode], sizes_of(sizes or ()), most_parameters(largest), **common))


def _kernel_rows(conditions: "list[Condition]", warm_up: int, steps: int, out: Path | None) -> "Iterator[KernelRow]":
    """A row for each condition, appended to ``out`` and told as soon as it is there."""
    from lowtide.bench.attention_table import measure_kernel, write_reference
    from lowtide.bench.cell import Effort
    from lowtide.bench.isolate import isolated
    from lowtide.bench.lines import append_line
    from lowtide.bench.provenance import machine

    device, effort = device_for(conditions), Effort(warm_up, steps)
    facts = isolated(machine, device, device=device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "reference.pt"
        missing = write_reference(conditions[0], device, path, effort.timeout_s)
        say(f"float32 reference: {missing or 'made'}")
        for condition in conditions:
            row = measure_kernel(condition, effort, device, facts, None if missing else path)
            if missing and row.record.figures is not None:
                row = replace(row, why_no_cosine=f"no float32 reference: {missing}")
            if out is not None:
                append_line(out / "attention.jsonl", row.as_dict())
            say(f"{condition.attention}: {row.record.state}")
            yield row


def _kernels_in_words(rows: "list[KernelRow]") -> Iterator[RenderableType]:
    """The table, and below it why a figure is not there."""
    table = _table("kernel", "s/step", "peak", "cosine")
    for row in rows:
        record, figures = row.record, row.record.figures
        near = "none" if row.cosine is None else f"{row.cosine:.6f}"
        numbers = (f"{figures.step_s:.4f}", format_bytes(figures.peak_allocated_bytes), near) if figures else ()
        table.add_row(record.condition.attention, *(numbers or (record.state,)))
    yield table
    yield ""
    for row in rows:
        why = row.record.reason or (row.why_no_cosine and f"no cosine: {row.why_no_cosine}")
        if why:
            yield f"{row.record.condition.attention}: {why}"


def _host_in_words(found: "Mapping[str, list[HostCost]]") -> Iterator[RenderableType]:
    for title, costs in found.items():
        table = _table(f"{title}, µs a block", "total", "added", "of torch's", "lag", "goal")
        for cost in costs:
            words = {None: "", True: f"{cost.goal} met", False: f"{cost.goal} missed"}[cost.meets_goal]
            numbers = (f"{cost.total_us:.1f}", f"{cost.added_us:.1f}", f"{cost.ratio_to_torch:.2f}")
            table.add_row(cost.row, *numbers, f"{cost.lag_us:.1f}", words)
        yield table
        yield ""
    yield HOST_NOTE


def _profile_in_words(found: "Timeline") -> Iterator[RenderableType]:
    shares = _table("share", "%", "of")
    for name, share, whole in (
        ("kernels running", found.running, "the window"),
        ("copies running", found.copying, "the window"),
        ("GEMM", found.gemm, "kernel time"),
        ("attention", found.attention, "kernel time"),
    ):
        shares.add_row(name, f"{100 * share:.1f}", whole)
    yield shares
    yield ""
    if found.gap is None:
        yield "No gap between kernels."
    else:
        yield f"Largest gap: {found.gap.us:.1f} µs, after {_short(found.gap.after)}, before {_short(found.gap.before)}"
    yield ""
    top = _table("kernel", "% of kernel time")
    for name, share in found.top:
        top.add_row(Text(_short(name)), f"{100 * share:.1f}")
    yield top


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading)
    return table


def _short(name: str, most: int = 60) -> str:
    """A kernel's name may be a whole C++ template."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
