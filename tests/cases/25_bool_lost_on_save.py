import argparse

from _common import ADAPTER, Case

c = Case(
    25,
    "a flag set to false is dropped on save and comes back as the default true",
    "bghira/SimpleTuner PR#2544; derrian-distro/LoRA_Easy_Training_Scripts PR#176; unslothai/unsloth PR#7942",
    "config -> file -> config is the identity for every field, with false, null and default values",
)


def naive_dump(cfg, defaults):
    return {k: v for k, v in cfg.items() if v and v != defaults.get(k)}


D = {"gradient_checkpointing": True, "interval": 1, "offload": False, "lr": None}
for cfg in (
    {"gradient_checkpointing": False, "interval": 1, "offload": False, "lr": None},
    {"gradient_checkpointing": True, "interval": 2, "offload": False, "lr": 0.0},
):
    back = {**D, **naive_dump(cfg, D)}
    c.row("naive-prune-falsy", back == cfg, f"{cfg} -> {back}")
p = argparse.ArgumentParser()
p.add_argument("--gradient_checkpointing", type=bool, default=True)
c.row(
    "stock argparse type=bool",
    p.parse_args(["--gradient_checkpointing", "false"]).gradient_checkpointing is False,
    "'--gradient_checkpointing false' -> True",
)
if ADAPTER is not None and hasattr(ADAPTER, "dump") and hasattr(ADAPTER, "parse"):
    for cfg in ({"gradient_checkpointing": False}, {"gradient_checkpointing": True, "interval": 2}):
        c.try_(
            f"adapter{cfg}", lambda cfg=cfg: ((r := ADAPTER.parse(cfg)) == ADAPTER.parse(ADAPTER.dump(r)), "round trip")
        )
c.end()
