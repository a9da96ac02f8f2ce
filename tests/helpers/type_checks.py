"""Which tests check types and shapes of symmerge's functions while they run, and how often."""

from collections import Counter
from functools import cache, wraps
from inspect import isfunction
from pathlib import Path

import jaxtyping

# A check of one call takes longer than most functions, and some are called thousands of times by
# one test: the first calls in every test are checked, which was five times as fast.
CALLS = 3
TESTS = Path(__file__).parent.parent
# Where whole solves and commands run again through what other tests check, types are not checked
# once more: it made them take 52 s instead of 33.
UNCHECKED = (
    *(
        "aligning/",
        "cli/",
        "derivation/",  # follows thousands of axes
        "docs/",
        "fuzz/",
        "lab/",
        "report/",
        "families/test_realistic",
        "families/test_negative_controls",  # runs what test_invariance does
        "models/test_absorption",
        "models/test_widening",
        "checkpoints/test_checkpoint",
        "verification/",
    ),
    *("evaluation/test_dead_leaves", "evaluation/test_simplices", "observation/test_correlations"),
    *("matching/test_joint", "matching/test_learned", "matching/test_recipes"),
    *("matching/test_soft", "matching/test_threads", "matching/test_universes"),
    *("matching/test_matching", "matching/test_activation_matching", "checkpoints/test_strange"),
)


def is_checked(path):
    """Whether types and shapes are checked in the tests of a file; in doctests they are."""
    return TESTS not in path.parents or not path.relative_to(TESTS).as_posix().startswith(UNCHECKED)


_seen: Counter = Counter()
_allowed = 0


def start_test(path):
    """From here on the first calls of every function are checked, or none in these files."""
    global _allowed
    _seen.clear()
    _allowed = CALLS if is_checked(path) else 0


def install():
    """Instrument symmerge, which must not have been imported yet."""
    full = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker):
        check = full(typechecker=typechecker)

        def instrumented(made):
            if "<locals>" in made.__qualname__:
                return made  # it would be made, and its check built, at every call of the outer one
            return _first_calls(made, check) if isfunction(made) else check(made)

        return instrumented

    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook("symmerge", "beartype.beartype")


def _first_calls(made, check):
    # built when first needed: building all takes three seconds
    checked = cache(lambda: check(made))

    @wraps(made)
    def call(*args, **kwargs):
        if _seen[made] >= _allowed:
            return made(*args, **kwargs)
        _seen[made] += 1
        return checked()(*args, **kwargs)

    return call
