"""The layout in ARCHITECTURE.md holds: imports point down, engines stay in their files, modules stay small."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tailrace"
LAYERS = [  # top to bottom; a module may import its own layer and the ones below
    {"__init__", "__main__", "cli", "testing"},
    {"tree", "huggingface"},
    {"checkpoint"},
    {"flow"},
    {"storage"},
    {"format"},
    {"errors", "_version"},
]
MAY_IMPORT = {  # engine: the packages or modules that may name it
    "tensorstore": {"storage.foreign"},
    "jax": {"tree", "testing"},
    "orbax": {"testing"},
    "typer": {"cli"},
    "rich": {"cli"},
}
MAX_LINES = 400

FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}


def imported(path, *, lazily=True):
    """Absolute dotted names of all imports; `lazily`: also those inside functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; names are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path):
    """The top-level modules and packages of ours that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("tailrace.")} & DEPTH.keys()


def test_every_package_has_its_layer():
    """A new one must be placed."""
    assert {module.split(".")[0] for module in FILES} == DEPTH.keys()


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    """A module imports from its own layer or a lower one."""
    top = module.split(".")[0]
    upward = {other for other in ours(FILES[module]) if DEPTH[other] < DEPTH[top]}

    assert not upward, f"{module} imports from a layer above it: {sorted(upward)}"


@pytest.mark.parametrize("module", FILES)
def test_engines_stay_in_their_files(module):
    """jax, tensorstore, Orbax and the command line's packages are named only where MAY_IMPORT says."""
    used = {name.split(".")[0] for name in imported(FILES[module])} & MAY_IMPORT.keys()
    strayed = {
        engine for engine in used if not any(f"{module}.".startswith(f"{place}.") for place in MAY_IMPORT[engine])
    }

    assert not strayed, f"{module} must not import {sorted(strayed)}; see MAY_IMPORT"


@pytest.mark.parametrize("module", FILES)
def test_jax_is_imported_when_it_is_needed(module):
    """Never at the top of a module: all but trees of jax.Arrays works without it."""
    at_top = {name.split(".")[0] for name in imported(FILES[module], lazily=False)}

    assert not at_top & {"jax", "tensorstore", "orbax"}


@pytest.mark.parametrize("module", FILES)
def test_module_size(module):
    """No module outgrows a screenful of subjects."""
    lines = FILES[module].read_text().count("\n")

    assert lines <= MAX_LINES, f"{module} has {lines} lines, over {MAX_LINES}: split it by subject"


def test_no_import_cycles():
    """The top-level packages form no cycle."""
    graph = {}
    for module, path in FILES.items():
        graph.setdefault(module.split(".")[0], set()).update(ours(path) - {module.split(".")[0]})
    TopologicalSorter(graph).prepare()
