from _common import ADAPTER, Case

c = Case(
    74,
    "offload is slower and saves nothing for short sequences; users want the library to choose",
    "unslothai/unsloth PR#3867; unslothai/unsloth#1418",
    "the planner prefers plain < interval < full checkpoint < offload as memory need grows, never picks a plan over the budget, says why, and is monotone in budget",
)
if ADAPTER is None or not hasattr(ADAPTER, "plan"):
    c.note("needs an adapter with plan(...)")
else:
    prev = None
    for gb in (1, 4, 8, 16, 24, 48, 80):
        try:
            p = ADAPTER.plan(
                blocks=40, activation_bytes=200 * 2**20, block_input_bytes=40 * 2**20, budget_bytes=gb * 2**30
            )
            c.row(f"adapter budget {gb} GiB", True, p)
        except Exception as e:
            c.row(f"adapter budget {gb} GiB", gb <= 1, f"{type(e).__name__}: {e}")
c.end()
