"""symmerge: merge Transformers that were trained from different initialisations."""

from symmerge.align import Aligned, align, same
from symmerge.alignment import Alignment, apply
from symmerge.barrier import Curve, barrier
from symmerge.canonical import canonicalize
from symmerge.combine import combine
from symmerge.errors import SymmergeError
from symmerge.many import AlignedMany, align_many
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.base import Solution
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.soft import SoftMatching
from symmerge.matching.weights import WeightMatching
from symmerge.merge import mean, merge
from symmerge.model import Model, load, save
from symmerge.plane import plane
from symmerge.soup import soup
from symmerge.tasks import make_task
from symmerge.verify import Verdict, verify
from symmerge.widen import widen

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
