"""Dependencies between the parts of lowtide point down only, and the lower parts stay light. Read from the imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lowtide"

# From the ground up. Modules of one layer may use each other, as long as no cycle comes of it.
LAYERS = (
    ("errors", "units", "signals", "allocator", "warn"),
    ("families",),
    ("plan",),
    ("runtime",),
    ("keys", "controls", "attention_backend", "handle", "region", "offload", "testing", "inert", "checkpoint_wrappers"),
    ("measure",),
    ("auto",),
    ("attaching",),
    ("train",),
    ("bench",),
    ("cli", "__main__"),
)
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}

# What may be imported besides the standard library and lowtide itself, however late. Other parts may use anything.
ALLOWED: Mapping[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "allocator": set(),
    "warn": set(),
    "signals": set(),
    "families": set(),
    "plan": {"numpy"},  # the search is a hundred times slower on lists
    "runtime": {"torch"},
    "keys": {"pydantic"},
    "controls": {"pydantic"},
    "handle": {"torch"},
    "region": {"torch"},
    "offload": {"torch"},
    "testing": set(),
    "inert": set(),
    "attention_backend": {"torch", "diffusers"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, for_types_only: bool = True) -> Iterator[str]:
    """The modules that a module imports, also inside functions: late imports are how a cycle hides.

    for_types_only: whether to count what is imported under ``if TYPE_CHECKING`` too.
    """
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in _nodes(ast.parse(MODULES[name].read_text(encoding="utf-8")), for_types_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in MODULES else module


def _nodes(tree: ast.AST, for_types_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if for_types_only or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _nodes(node, for_types_only)


def part_of(module: str) -> str:
    """The part of lowtide that a module belongs to; the package itself is none."""
    return module.split(".")[1] if "." in module else ""


def test_every_part_has_a_layer() -> None:
    assert {part_of(name) for name in MODULES} - {""} <= set(HEIGHT)


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name)])
def test_dependencies_point_down(name: str) -> None:
    height = HEIGHT[part_of(name)]
    above = {target for target in imports(name) if target.startswith("lowtide.") and HEIGHT[part_of(target)] > height}
    assert not above, f"{name} is in a lower layer than {', '.join(sorted(above))}"


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name) in ALLOWED])
def test_lower_parts_need_little(name: str) -> None:
    foreign = {target.partition(".")[0] for target in imports(name)} - {"lowtide"} - set(sys.stdlib_module_names)
    assert foreign <= ALLOWED[part_of(name)]


def test_there_is_no_import_cycle() -> None:
    parts = [name for name in MODULES if part_of(name)]
    graph = {name: {target for target in imports(name, for_types_only=False) if part_of(target)} for name in parts}
    done: set[str] = set()
    for start in graph:
        assert not (cycle := _cycle_from(start, graph, done, [])), " -> ".join(cycle)


def _cycle_from(name: str, graph: Mapping[str, set[str]], done: set[str], path: list[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    for target in sorted(graph.get(name, ())):
        cycle = _cycle_from(target, graph, done, [*path, name])
        if cycle:
            return cycle
    done.add(name)
    return []


def loaded_after(code: str, *suspects: str) -> list[str]:
    code = f"import sys; {code}; print(*(name for name in {suspects} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


def test_importing_lowtide_loads_nothing_slow() -> None:
    assert loaded_after("import lowtide", "torch", "diffusers", "pydantic", "rich") == []


def test_families_and_plans_load_without_torch() -> None:
    assert loaded_after("import lowtide.families, lowtide.plan.schedule, lowtide.plan.held", "torch", "diffusers") == []


def test_the_library_needs_no_diffusers() -> None:
    code = "sys.modules['diffusers'] = None; import lowtide; lowtide.attach, lowtide.checkpoint"
    assert loaded_after(code, "torch") == ["torch"]
