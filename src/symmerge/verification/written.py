"""The gate: what is written must compute what its source does, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

from symmerge.checkpoints.provenance import Verdict
from symmerge.errors import OVERFLOW, FunctionChanged
from symmerge.models.model import (
    Gate,
    Model,
)
from symmerge.models.progress import Progress
from symmerge.verification.inputs import has_many_outputs, samples
from symmerge.verification.transport import check_transport
from symmerge.verification.verdict import check_comparable, compare, describe

PASSES = 4  # over all tensors: the transport, the source, what was written, that with noise
WORKERS = 2  # run one model each
Run = Callable[..., Verdict]
"""How a source and what became of it are run: `run(source, written, progress=...)`."""


def gate(
    source: Model, *, progress: Progress | None = None, run: Run | None = None, device: str = "cpu"
) -> Gate:
    """A gate for `save`: raise unless the written checkpoint computes what `source` does."""

    def check(written: Model, computed: Model) -> Verdict:
        # Without hashing: it is compared with what its hash would have to be.
        written = replace(written, weights=written.source.base)
        how = {"run": run or run_briefly, "progress": progress, "device": device}
        return check_function(source, written, computed, **how)

    return check


def check_function(
    source: Model,
    written: Model,
    computed: Model,
    *,
    run: Run,
    progress: Progress | None = None,
    device: str = "cpu",
) -> Verdict:
    """Raise unless `written` computes what `source` does.

    Every tensor is compared with what the alignment of `computed` makes of it, calculated in
    another way; then both models are run.
    """
    tensors = check_transport(written, computed, progress=progress, device=device)
    if not source.custom:  # a user's module stays where it is
        source, written = source.placed(device), written.placed(device)
    verdict = run(source, written, progress=progress)
    if not isfinite(verdict.difference):
        raise FunctionChanged(
            f"refused: in the outputs of {source.where} or of the new checkpoint, {OVERFLOW};"
            " nothing was written"
        )
    if not verdict.same:
        raise FunctionChanged(
            f"refused: the new checkpoint does not compute what {source.where} does"
            f" ({describe(verdict)}); nothing was written."
            " This is a bug or an ill-conditioned element: please report it"
        )
    return replace(verdict, tensors=tensors)


def run_briefly(source: Model, written: Model, *, progress: Progress | None = None) -> Verdict:
    """Compare both on few tokens through all layers, and on every row without them."""
    if source.custom:
        return source.custom.compare(source, written)
    check_comparable(source, written)
    pairs = [(sample, sample) for sample in samples(source, 0, long=False)]
    draws = 0, 1 if has_many_outputs(source) else 2
    how = {"draws": draws, "all_rounded": True, "workers": WORKERS}  # a symmetry moves nearly all
    return compare(source, written, pairs, **how, progress=progress)
