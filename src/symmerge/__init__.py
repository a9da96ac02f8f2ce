"""symmerge: merge Transformers that were trained from different initialisations."""

from symmerge.alignment import Alignment, apply
from symmerge.canonical import canonicalize
from symmerge.errors import SymmergeError
from symmerge.model import Model, load, save
from symmerge.verify import Verdict, verify

__all__ = ["Alignment", "Model", "SymmergeError", "Verdict", "apply", "canonicalize", "load", "save", "verify"]
__version__ = "0.1.0"
