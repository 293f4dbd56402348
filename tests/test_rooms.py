"""The rooms of zeroxla/: a module imports only rooms before its own; no two classes share a name.

docs/architecture.md explains the order. Imports inside functions and under TYPE_CHECKING count:
they say who knows whom.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "zeroxla"

# From the ground up. Rooms of one floor know nothing of each other.
FLOORS = (
    {"program"},
    {"config"},
    {"mesh"},
    {"offload"},
    {"wire"},
    {"fetch", "frontend", "split"},
    {"step"},
    {"pipeline", "hybrid"},
    {"rlhf"},
    {"inspect"},
    {"planning"},
    {"checkpoint"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Below all of them: folders of the repository that are linked into the package.
LINKED = ("models", "pallas_kernels")
# What the package shows at its root: no room, and free to import any.
FRONT = ("__init__", "__main__", "data", "quantize")


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of the package by dotted name, linked folders included."""
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_symlink()]
    for name in LINKED:
        files += (PACKAGE / name).glob("*.py")
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(modules()[module].read_text())


def imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports, anywhere in it."""
    is_package = modules()[module].name == "__init__.py"
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, base]) if base else ".".join(up)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base)
    return {name for name in found if name.split(".")[0] == "zeroxla"}


def room_of(module: str) -> str | None:
    """Return the room of a module; None for what stands at the root."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in FRONT else None


def test_every_file_is_in_a_room():
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    front = {f"{name}.py" for name in FRONT}
    assert entries == {*FLOOR_OF, *LINKED, *front, "py.typed"}
    assert len(entries) <= 23


def test_rooms_import_only_rooms_before_them():
    wrong = []
    for module in modules():
        room = room_of(module)
        if room is None:
            continue
        for imported in imports(module):
            other = room_of(imported)
            if other == room or (other in LINKED and room not in LINKED):
                continue
            if room in LINKED or other is None or FLOOR_OF[other] >= FLOOR_OF[room]:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


@pytest.mark.smoke
def test_no_modules_import_each_other_in_a_circle():
    graph = {module: imports(module) & modules().keys() - {module} for module in modules()}
    # A package's own file may gather what its modules offer; they do not import it back.
    while leaves := [m for m, targets in graph.items() if not targets & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not graph, f"in a circle, or above one: {sorted(graph)}"


IMPORT_EACH_FIRST = """
import os, sys, types
import jax, flax, flax.linen, flax.nnx, optax, orbax.checkpoint, rich.table, tyro
sys.path.insert(0, {root!r})
failed = []
for name in {names!r}:
    for known in [m for m in sys.modules if m.split(".")[0] == "zeroxla"]:
        del sys.modules[known]
    bare = types.ModuleType("zeroxla")  # its own file would import the others first
    bare.__path__ = [{package!r}]
    sys.modules["zeroxla"] = bare
    try:
        __import__(name)
    except Exception as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
print("\\n".join(failed))
"""


@pytest.mark.slow  # without circles it follows
def test_every_module_can_be_imported_first():
    names = [m for m in sorted(modules()) if room_of(m) and not m.endswith("__main__")]
    if importlib.util.find_spec("triton") is None:  # an extra; its kernels import it
        names = [m for m in names if not m.startswith("zeroxla.pallas_kernels.triton_")]
    code = IMPORT_EACH_FIRST.format(root=str(REPOSITORY), names=names, package=str(PACKAGE))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), done.stdout


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for module in modules():
        if room_of(module) in LINKED:
            continue
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_files_are_short():
    lengths = {m: len(path.read_text().splitlines()) for m, path in modules().items()}
    assert not {m: n for m, n in lengths.items() if n > 500}
    assert statistics.median(lengths.values()) <= 150


def test_the_architecture_page_names_the_rooms_in_order():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    places = [page.index(f"| `{room}` |") for floor in FLOORS for room in sorted(floor)]
    firsts = [min(group) for group in _by_floor(places)]
    lasts = [max(group) for group in _by_floor(places)]
    assert all(last < first for last, first in zip(lasts, itertools.islice(firsts, 1, None)))


def _by_floor(places: list[int]) -> list[list[int]]:
    rest = iter(places)
    return [list(itertools.islice(rest, len(floor))) for floor in FLOORS]
