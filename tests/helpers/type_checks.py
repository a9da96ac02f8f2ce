"""Which tests check types and shapes of symmerge's functions while they run."""

from pathlib import Path

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
