from _common import ADAPTER, Case, tiny_flux

c = Case(
    27,
    "interval / stride: 0, negative, True, '2', 2.5, larger than the number of blocks",
    "bghira/SimpleTuner PR#1221 PR#1230 PR#1398; PrimeIntellect-ai/prime-diloco PR#31",
    "0, negative, bool, fraction raise with the value and the limit; '2' is 2 or an error; > n_blocks warns; None means 1",
)


def naive_select(n, interval):
    return [i for i in range(n) if i % interval == 0]


for v in (1, 2, 3, 99, 0, -1, True, "2", 2.5, None):
    try:
        c.row(f"naive interval={v!r}", type(v) is int and v in (1, 2, 3, 99), f"blocks {naive_select(6, v)} of 6")
    except Exception as e:
        c.row(f"naive interval={v!r}", False, f"{type(e).__name__}: {e}")
if ADAPTER is not None and hasattr(ADAPTER, "enable"):
    for v in (0, -1, True, 2.5, "two", float("nan")):
        c.raises(
            f"adapter interval={v!r}", lambda v=v: ADAPTER.enable(tiny_flux(), interval=v), (ValueError, TypeError)
        )
    for v in (1, 2, None, 99):
        c.try_(
            f"adapter interval={v!r}", lambda v=v: (ADAPTER.enable(tiny_flux(), interval=v) is None or True, "accepted")
        )
c.end()
