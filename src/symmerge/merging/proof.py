"""What a merge proves: that its parents kept their functions. The merge itself is a new one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder
from symmerge.aligning.many import AlignedMany
from symmerge.aligning.tokens import verify_shared
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress
from symmerge.verification.written import Run, check_function, run_briefly

NEW = "the merge itself is a new function, which can only be measured"


def prove_parents(
    result: Aligned | AlignedMany | AlignedFolder, progress: Progress | None, device: str = "cpu"
) -> dict[str, str]:
    """Check every aligned parent against its source, as the gate does; raise if one changed.

    Models of an aligned folder were checked when they were written; their records say how.
    """
    if isinstance(result, AlignedFolder):
        return {"proved": _proved_before(result), "not_proved": NEW}
    if result.recipe.non_symmetric:
        why = f"nothing was proved: the alignment is not a symmetry ({result.recipe.about})"
        return {"proved": why, "not_proved": NEW}
    tensors, units = 0, 0.0
    for source, parent, run in _parents(result):
        if progress:
            progress(Phase(f"checking that {source.where} kept its function"))
        how = {"run": run, "progress": progress, "device": device}
        verdict = check_function(source, parent, parent, **how)
        tensors, units = tensors + (verdict.tensors or 0), max(units, verdict.units)
    proved = (
        f"aligned, {'both' if len(result.models) == 2 else f'all {len(result.models)}'} parents"
        f" compute what they did before: {tensors} tensors recomputed,"
        f" logits within {units:.2g} of what rounding explains"
    )
    return {"proved": proved, "not_proved": NEW}


def _proved_before(folder: AlignedFolder) -> str:
    verdicts = [origin.verified for origin in folder.origins]
    unproved = [
        origin.source
        for origin, verdict in zip(folder.origins, verdicts, strict=True)
        if verdict is None
    ]
    if unproved:
        return f"nothing of {', '.join(unproved)}: align wrote it without a check"
    tensors = sum(verdict.tensors or 0 for verdict in verdicts if verdict)
    units = max(verdict.units for verdict in verdicts if verdict)
    return (
        f"when {folder.path.name} was written, all {len(verdicts)} parents computed what they did:"
        f" {tensors} tensors recomputed, logits within {units:.2g} of what rounding explains"
    )


def _parents(result: Aligned | AlignedMany) -> Iterator[tuple[Model, Model, Run]]:
    if isinstance(result, AlignedMany):
        for number, parent in zip(result.universe.members, result.models, strict=True):
            yield result.sources[number], parent, run_briefly
        return
    yield result.sources[0], result.reference, run_briefly
    shared = result.shared
    run = partial(verify_shared, shared=shared) if shared else run_briefly
    yield result.sources[1], result.aligned, run
