"""symmerge: merge Transformers that were trained from different initialisations."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symmerge.aligning.aligned import Aligned
    from symmerge.aligning.equivalence import Certificate, same
    from symmerge.aligning.folders import AlignedFolder, load_aligned
    from symmerge.aligning.many import AlignedMany, align_many
    from symmerge.aligning.options import AlignOptions
    from symmerge.aligning.pair import align
    from symmerge.derivation.deriving import Derivation, derive
    from symmerge.errors import SymmergeError
    from symmerge.evaluation.evaluation_results import EvaluationFile
    from symmerge.evaluation.harness import Harness
    from symmerge.evaluation.lines import Curve, barrier
    from symmerge.evaluation.planes import plane
    from symmerge.evaluation.side_by_side import evaluate
    from symmerge.evaluation.tasks import make_task
    from symmerge.lineage.examine import kinship
    from symmerge.lineage.merges import shares
    from symmerge.lineage.results import Kinship, MergeShares
    from symmerge.matching.activations import ActivationMatching
    from symmerge.matching.base import Solution
    from symmerge.matching.learned import LearnedMatching
    from symmerge.matching.recipes import RECIPES as recipes
    from symmerge.matching.soft import SoftMatching
    from symmerge.matching.weights import WeightMatching
    from symmerge.merging.combining import combine
    from symmerge.merging.healing import Healed, HealOptions, heal
    from symmerge.merging.means import average
    from symmerge.merging.mergekit_reading import read_mergekit
    from symmerge.merging.pipeline import merge
    from symmerge.merging.rescaling import repair
    from symmerge.merging.soups import soup
    from symmerge.merging.verdict import judge
    from symmerge.merging.verdict_results import MergeVerdict
    from symmerge.models.alignment import Alignment, apply
    from symmerge.models.canonical.form import canonicalize
    from symmerge.models.interpolation import mean
    from symmerge.models.model import (
        Model,
        load,
    )
    from symmerge.models.orbit import random_member
    from symmerge.models.saving import save
    from symmerge.models.widening import widen
    from symmerge.report.published import publish
    from symmerge.transporting.directions import carry_direction, carry_moments
    from symmerge.transporting.frames import Passage
    from symmerge.transporting.job import Transported, transport
    from symmerge.transporting.several import transport_all
    from symmerge.transporting.streams import StreamMap, carry_probe, fit_streams
    from symmerge.verification.verdict import Verdict, verify

__all__ = [
    "ActivationMatching",
    "AlignOptions",
    "Aligned",
    "AlignedFolder",
    "AlignedMany",
    "Alignment",
    "Certificate",
    "Curve",
    "Derivation",
    "EvaluationFile",
    "Harness",
    "HealOptions",
    "Healed",
    "Kinship",
    "LearnedMatching",
    "MergeShares",
    "MergeVerdict",
    "Model",
    "Passage",
    "SoftMatching",
    "Solution",
    "StreamMap",
    "SymmergeError",
    "Transported",
    "Verdict",
    "WeightMatching",
    "align",
    "align_many",
    "apply",
    "average",
    "barrier",
    "canonicalize",
    "carry_direction",
    "carry_moments",
    "carry_probe",
    "combine",
    "derive",
    "evaluate",
    "fit_streams",
    "heal",
    "judge",
    "kinship",
    "load",
    "load_aligned",
    "make_task",
    "mean",
    "merge",
    "plane",
    "publish",
    "random_member",
    "read_mergekit",
    "recipes",
    "repair",
    "same",
    "save",
    "shares",
    "soup",
    "transport",
    "transport_all",
    "verify",
    "widen",
]
__version__ = "0.2.0"


@cache
def _homes() -> dict[str, tuple[str, str]]:
    """Public name -> (module, name there), read off the imports for type checkers above."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(__file__).read_text("utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in nodes
        if (node.module or "").startswith("symmerge.")
        for alias in node.names
    }


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `symmerge --help` waits for no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _homes()[name]
    value = globals()[name] = getattr(import_module(module), there)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
