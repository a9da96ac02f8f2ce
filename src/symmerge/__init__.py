"""symmerge: merge Transformers that were trained from different initialisations."""

from symmerge.aligning.equivalence import same
from symmerge.aligning.many import AlignedMany, align_many
from symmerge.aligning.pair import Aligned, align
from symmerge.errors import SymmergeError
from symmerge.evaluation.lines import Curve, barrier
from symmerge.evaluation.planes import plane
from symmerge.evaluation.tasks import make_task
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.base import Solution
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.soft import SoftMatching
from symmerge.matching.weights import WeightMatching
from symmerge.merging.combining import combine
from symmerge.merging.means import merge
from symmerge.merging.soups import soup
from symmerge.models.alignment import Alignment, apply
from symmerge.models.canonical.form import canonicalize
from symmerge.models.interpolation import mean
from symmerge.models.model import Model, load, save
from symmerge.models.widening import widen
from symmerge.verification.verdict import Verdict, verify

__all__ = [
    "ActivationMatching",
    "Aligned",
    "AlignedMany",
    "Alignment",
    "Curve",
    "LearnedMatching",
    "Model",
    "SoftMatching",
    "Solution",
    "SymmergeError",
    "Verdict",
    "WeightMatching",
    "align",
    "align_many",
    "apply",
    "barrier",
    "canonicalize",
    "combine",
    "load",
    "make_task",
    "mean",
    "merge",
    "plane",
    "same",
    "save",
    "soup",
    "verify",
    "widen",
]
__version__ = "0.1.0"
