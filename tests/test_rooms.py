"""The floor plan: imports point downwards, the laboratory stands apart, names are unique."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import symmerge
from symmerge.families import BY_MODEL_TYPE, FAMILIES

pytestmark = pytest.mark.quick

ROOT = Path(symmerge.__file__).parent
# Each room may import those before it.
ROOMS = (
    *("errors", "distributed", "symmetry", "families", "checkpoints", "models", "verification"),
    *("evaluation", "derivation", "observation", "matching", "aligning", "merging"),
    *("transporting", "lineage", "report", "lab", "cli"),
)
FILES = {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
NAMES = {*BY_MODEL_TYPE, *(family.name for family in FAMILIES)} - {"opt", "clip"}
# options and optimizers are no architecture, and neither is clipping
ARCHITECTURES = re.compile(rf"(?<![a-z])({'|'.join(NAMES)}|opt(?![is]))", re.IGNORECASE)
KNOW_ARCHITECTURES = {"families", "lab"}


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imported_rooms(tree: ast.Module) -> set[str]:
    """Rooms that a file imports, also inside functions and for type checkers alone."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    ]
    return {name.split(".")[1] for name in modules if name.startswith("symmerge.")}


def upward_imports(files: dict[Path, ast.Module]) -> list[str]:
    """Imports of a room that is not below, as 'file -> room'; __init__ and __main__ may."""
    return [
        f"{file} -> {target}"
        for file, tree in files.items()
        if room_of(file) not in ("__init__", "__main__")
        for target in imported_rooms(tree) - {room_of(file)}
        if ROOMS.index(target) >= ROOMS.index(room_of(file))
    ]


def public(tree: ast.Module, kind: type[ast.AST]) -> list[str]:
    return [
        node.name
        for node in tree.body
        if isinstance(node, kind) and not node.name.startswith("_")  # type: ignore[attr-defined]
    ]


def named(tree: ast.Module) -> set[str]:
    """Identifiers and strings, docstrings left out, that name a family or a model type."""
    nodes = list(ast.walk(tree))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    values = {
        value
        for node in nodes
        if node not in docstrings
        for _, value in ast.iter_fields(node)
        if isinstance(value, str)
    }
    return set(filter(ARCHITECTURES.search, values))


def test_imports_point_downwards_and_the_product_does_not_know_the_laboratory():
    assert not upward_imports(FILES)
    assert ROOMS[-2:] == ("lab", "cli"), "everything below the command line is the product"
    upward = ast.parse("def late():\n    from symmerge.lab.training import recipes")
    assert upward_imports({Path("models/orbit.py"): upward}) == ["models/orbit.py -> lab"]


def test_the_top_level_is_small():
    packages = [path for path in ROOT.iterdir() if (path / "__init__.py").exists()]
    assert len(list(ROOT.glob("*.py"))) <= 6 and len(packages) <= 16


def test_only_families_and_the_laboratory_know_an_architecture_by_name():
    outside = {
        file: named(tree) for file, tree in FILES.items() if room_of(file) not in KNOW_ARCHITECTURES
    }
    assert not {file: names for file, names in outside.items() if names}
    assert named(ast.parse("if model_type == 'gpt2': pass")) == {"gpt2"}


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for file, tree in FILES.items():
        for name in public(tree, ast.ClassDef):
            homes[name].append(str(file))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_no_public_function_shadows_its_module():
    shadows = [
        str(file) for file, tree in FILES.items() if file.stem in public(tree, ast.FunctionDef)
    ]
    assert not [
        file for file in shadows if not file.startswith("cli/")
    ]  # a verb's file holds the verb
