"""Imports inside symmerge point one way, and only the families know a model by name."""

import ast
import re
from pathlib import Path

import pytest

import symmerge
from symmerge.families import BY_MODEL_TYPE, FAMILIES

ROOT = Path(symmerge.__file__).parent
# Each may import those before it; a few may import even less.
ORDER = [
    "errors",
    "estimates",
    "tensorfile",
    "notation",
    "groups",
    "spec",
    "answers",
    "families",
    "weights",
    "checkpoint",
    "hub",
    "card",
    "model",
    "alignment",
    "absorb",
    "canonical",
    "verify",
]
ORDER += [
    "widen",
    "circuits",
    "merge",
    "combine",
    "mergekit",
    "activations",
    "moments",
    "processes",
    "statistics",
    "probe",
    "tasks",
    "calibration",
    "correlations",
    "mixture",
    "soup",
    "repair",
    "plane",
    "barrier",
    "simplex",
]
ORDER += ["report", "matching", "orbit", "align", "vocabulary", "many", "inspection", "__init__", "zoo", "demo", "experiments", "console", "cli", "__main__"]
ONLY = {"weights": {"errors"}, "checkpoint": {"errors", "weights"}, "hub": {"errors", "checkpoint"}, "console": {"errors"}}
NAMES = re.compile(rf"(?<![a-z])({'|'.join({*BY_MODEL_TYPE, *(family.name for family in FAMILIES)})})", re.IGNORECASE)

FILES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
LAYERS = {file: file.removesuffix(".py").split("/")[0] for file in FILES}


def imports(code: str) -> set[str]:
    """The parts of symmerge that a module imports when it runs: what only a type checker sees does not count."""
    tree, found = ast.parse(code), set()
    unseen = {inner for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" for inner in ast.walk(node)}
    for node in set(ast.walk(tree)) - unseen:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not getattr(node, "level", 0), "write imports in full"
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {f"{start}{alias.name}.__init__".split(".")[1] for alias in node.names if f"{start}{alias.name}".split(".")[0] == "symmerge"}
    return {name if name in ORDER else "__init__" for name in found}  # `from symmerge import load` is from the package itself


def named_models(code: str) -> set[str]:
    """Identifiers and strings, docstrings left out, that name a family or a model type."""
    nodes = list(ast.walk(ast.parse(code)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    values = {value for node in nodes if node not in docstrings for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return set(filter(NAMES.search, values))


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    assert LAYERS[file] in ORDER, f"say in ORDER what {LAYERS[file]} may import"
    earlier = set(ORDER[: ORDER.index(LAYERS[file])])
    assert imports(FILES[file]) - {LAYERS[file]} <= ONLY.get(LAYERS[file], earlier)


@pytest.mark.parametrize("file", [file for file in FILES if LAYERS[file] not in ("families", "zoo", "experiments")])
def test_only_families_know_models_by_name(file):
    assert not named_models(FILES[file])


def test_wrong_imports_and_names_are_noticed():
    assert imports("def f():\n    from symmerge.model import load\nimport symmerge.spec, torch") == {"model", "spec"}
    assert imports("from symmerge import groups, load") == {"groups", "__init__"} and imports("import symmerge") == {"__init__"}
    assert not imports("if TYPE_CHECKING:\n    from symmerge.model import Model")
    for code in ("kind == 'BertModel'", "is_llama = 1", "x = f'{y} gpt2'", "def vit(): pass", "x.neox", "def f(*, qwen2=1): pass"):
        assert named_models(code), code
    assert not named_models("def activity():\n    '''As in BERT.'''\n    return 'alberta'")
