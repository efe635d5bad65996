import torch

from _common import ADAPTER, Case

c = Case(
    72,
    "pinned host memory: sizes rounded to powers of two, cgroup limit ignored, pin failure shown as 'CUDA out of memory', too many mappings",
    "wtdcode/vllm-backport PR#67; pytorch/pytorch#86097 PR#186161; sgl-project/sglang PR#35641; vllm-project/vllm-omni#2748; llm-compressor#2790",
    "the planner counts what pinning really takes, keeps under min(MemAvailable, cgroup limit, user cap), few large slabs, and falls back to pageable with one clear message",
)


def pow2(n):
    return 1 << (n - 1).bit_length()


shapes = [(1, 4608, 3072), (2, 4096 + 512, 3072), (1, 75600, 5120), (1, 32760, 1536)]
for s in shapes:
    n = 2
    for k in s:
        n *= k
    c.row(
        f"arithmetic {s} bf16",
        pow2(n) / n < 1.05,
        f"{n / 2**20:.1f} MiB of data, {pow2(n) / 2**20:.1f} MiB if rounded up: x{pow2(n) / n:.2f}",
    )


def limit():
    for p in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            v = open(p).read().strip()
            return None if v == "max" else int(v)
        except OSError:
            pass
    return None


tot = int(next(l for l in open("/proc/meminfo") if "MemAvailable" in l).split()[1]) * 1024
c.note(f"this machine: MemAvailable {tot / 2**30:.1f} GiB, cgroup limit {limit()}")
if ADAPTER is not None and hasattr(ADAPTER, "plan"):
    c.try_("adapter[plan]", lambda: (True, ADAPTER.plan(blocks=40, activation_bytes=75600 * 5120 * 2)))
if ADAPTER is not None and hasattr(ADAPTER, "pool_takes"):
    for s in shapes:
        n = 2
        for k in s:
            n *= k
        took = ADAPTER.pool_takes(n)
        c.row(f"adapter {s} bf16", n <= took < 1.05 * n, f"{n / 2**20:.1f} MiB of data take {took / 2**20:.1f} MiB")
if ADAPTER is not None and hasattr(ADAPTER, "pool_under"):
    pinned, pageable, told = ADAPTER.pool_under(2**24, [2**20] * 16)
    c.row(
        "adapter under a limit",
        0 < pinned <= 0.6 * 2**24 and pinned + pageable == 2**24 and len(told) == 1,
        f"of 16 MiB, {pinned / 2**20:g} MiB pinned, {pageable / 2**20:g} MiB pageable; told once: {told[:1]}",
    )
if torch.cuda.is_available():
    r0 = int(open("/proc/self/statm").read().split()[1])
    t = torch.empty(int(1.1 * 2**28), dtype=torch.uint8).pin_memory()
    c.note(
        f"CUDA: resident pages grew {(int(open('/proc/self/statm').read().split()[1]) - r0) * 4096 / 2**20:.0f} MiB for {t.numel() / 2**20:.0f} MiB pinned"
    )
c.end()
