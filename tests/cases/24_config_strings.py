from _common import ADAPTER, Case

c = Case(
    24,
    "'true' / 'false' / 'none' / 'off' strings from a UI or YAML are taken for something else",
    "unslothai/unsloth PR#7287 PR#7128 PR#5991 PR#7942; MakazhanAlpamys/Soup#797",
    "booleans and the usual spellings are normalised; unknown words raise and list the choices; 'none', 'null' and '' mean unset (None)",
)


def naive(v):  # the reported shape: only "false" and "" are off, all other strings are a mode name
    if isinstance(v, str):
        return v if v.lower() not in ("false", "") else False
    return v


want = {
    "true": True,
    "True": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "False": False,
    "0": False,
    "no": False,
    "off": False,
    "none": None,
    "": None,
    None: None,
    True: True,
    False: False,
    "unsloth": "unsloth",
    "UNSLOTH": "unsloth",
    "torch": "torch",
    " torch-ffn ": "torch-ffn",
    "unslot": "error",
    2: "error",
    "null": None,
}


def grade(label, f):
    wrong = []
    for v, w in want.items():
        try:
            g = f(v)
        except Exception:
            g = "error"
        if g != w or type(g) is not type(w):
            wrong.append(f"{v!r}->{g!r} (want {w!r})")
    c.row(label, not wrong, f"{len(want) - len(wrong)}/{len(want)} right; wrong: {'; '.join(wrong[:6])}")


grade("naive-parse", naive)
grade("python bool()", lambda v: bool(v))
if ADAPTER is not None and hasattr(ADAPTER, "parse_switch"):
    grade("adapter[parse_switch]", ADAPTER.parse_switch)
c.end()
