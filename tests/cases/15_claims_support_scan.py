import ast
import os

import diffusers

from _common import ADAPTER, Case

c = Case(
    15,
    "a model says it supports checkpointing but a part of it cannot be switched, or never checks the switch",
    "huggingface/diffusers PR#11146 (Mochi encoder); Tencent HunyuanVideo-1.5#54",
    "a table per family of what is covered, checked by a test; a clear error for the rest",
)
root = os.path.join(os.path.dirname(diffusers.__file__), "models")
rows = []
for dp, _, fs in os.walk(root):
    for f in fs:
        if f.endswith(".py"):
            src = open(os.path.join(dp, f)).read()
            t = ast.parse(src)
            for k in [n for n in ast.walk(t) if isinstance(n, ast.ClassDef)]:
                s = ast.unparse(k)
                reads = "self.gradient_checkpointing" in s.replace("self.gradient_checkpointing = ", "")
                sets = "self.gradient_checkpointing = " in s
                if reads and not sets and "_gradient_checkpointing_func" in s:
                    rows.append((f, k.name, "reads the switch, never defines it"))
c.row("stock scan", not rows, f"{len(rows)} suspicious classes")
for r in rows:
    c.note(r)
from diffusers import ZImageControlNetModel

try:
    z = ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[],
        control_in_dim=4,
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        add_control_noise_refiner=None,
    )
    c.row(
        "stock ZImageControlNet", hasattr(z, "gradient_checkpointing"), "instance has the attribute its forward reads"
    )

    def en():
        z.enable_gradient_checkpointing()
        return True, "enable call accepted"

    c.try_("stock ZImageControlNet.enable", en)
except TypeError as e:
    c.note(f"could not build ZImageControlNetModel: {e}")
if ADAPTER is not None and hasattr(ADAPTER, "enable") and hasattr(ADAPTER, "describe"):
    for places in ([0], [0, 1]):

        def found():
            """Attached without any switch of the model's, or refused because it has no stack."""
            z = ZImageControlNetModel(
                control_layers_places=places,
                control_refiner_layers_places=[],
                control_in_dim=4,
                dim=32,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                add_control_noise_refiner=None,
            )
            try:
                ADAPTER.enable(z)
            except ValueError as e:
                return len(places) == 1 and "no block stack" in str(e), f"refused: {str(e)[:90]}"
            return True, f"covered: {ADAPTER.describe(z)}"

        c.try_(f"adapter {len(places)} control layers", found)
c.end()
