from _common import ADAPTER, Case

c = Case(
    85,
    "layer index taken for group index: the wrong layers are offloaded or reloaded",
    "NVIDIA/TransformerEngine#1959",
    "for every (n_blocks, n_offloaded, stride) the set of offloaded blocks is the one documented; each is reloaded before its own backward; the last block is not offloaded needlessly",
)


def te_like(n, g):
    return {k: round((k + 1) * n / g) - 1 for k in range(g)}


for n, g in ((32, 5), (28, 4), (7, 7), (5, 2)):
    c.note(f"{n} layers, {g} groups -> boundaries {te_like(n, g)}")
if ADAPTER is not None and hasattr(ADAPTER, "schedule"):
    for n in (1, 2, 5, 28, 57):
        for k in (1, 2, 3, n):

            def r():
                s = ADAPTER.schedule(n, k)
                return len(set(s)) == len(s) and all(0 <= i < n for i in s), f"n={n} interval={k}: {s}"

            c.try_("adapter", r)
if ADAPTER is not None and hasattr(ADAPTER, "offloaded"):
    for n in (1, 2, 5, 28, 57):
        for k in (1, 2, 3, n):

            def r():
                s = ADAPTER.offloaded(n, k)
                last = (n - 1) // k * k  # the last segment stays: backward begins with it
                return s == list(range(last)), f"n={n} interval={k}: offloaded {s}"

            c.try_("adapter offloaded", r)
c.end()
