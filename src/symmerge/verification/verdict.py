"""Do two models compute the same function? `verify`, and the gate that runs before writing.

Logits are compared up to an additive constant, which a softmax ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import Verdict
from symmerge.errors import OVERFLOW, FunctionChanged, MismatchError
from symmerge.models.model import Model, Progress
from symmerge.models.tables import layer_count
from symmerge.symmetry.spec import listing
from symmerge.verification.inputs import describe_inputs, example_inputs
from symmerge.verification.modules import logits_of

# Storing weights in these precisions changes logits by at most 4.6e-15, 2.0e-6, 2.0e-3 and 1.2e-2
# (all families, five seeds). Independently trained models differ by 0.25 and more.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def verify(
    a: Model,
    b: Model,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Compare the logits of two models on the same random inputs.

    `dtype` is the precision to compute in; in float64, norms that transformers computes in float32
    are computed in float64. The default tolerance is that of the coarser stored precision.
    """
    _check_comparable(a, b)
    inputs = example_inputs(a, seed)
    logits = [logits_of(model, inputs, dtype=dtype, progress=progress) for model in (a, b)]
    described = f"{describe_inputs(inputs)}, seed {seed}"
    return judge(a, b, *logits, dtype=dtype, tolerance=tolerance, inputs=described)


def judge(
    a: Model,
    b: Model,
    logits_a: list[Tensor],
    logits_b: list[Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
    inputs: str,
) -> Verdict:
    """Whether two models' logits agree up to rounding and a constant that a softmax ignores."""
    pairs = [(_visible(a, x), _visible(b, y)) for x, y in zip(logits_a, logits_b, strict=True)]
    coarsest = max((a.dtype, b.dtype, dtype), key=lambda kind: torch.finfo(kind).eps)
    tolerance = TOLERANCE[coarsest] if tolerance is None else tolerance
    difference = max(((x - y).norm() / x.norm().clamp_min(1e-30)).item() for x, y in pairs)
    return Verdict(
        same=difference <= tolerance,
        difference=difference,
        largest=max((x - y).abs().max().item() for x, y in pairs),
        tolerance=tolerance,
        dtype=str(coarsest).removeprefix("torch."),
        inputs=inputs,
    )


def gate(
    source: Model, *, progress: Progress | None = None, compare: Callable[..., Verdict] = verify
) -> Callable[[Model], Verdict]:
    """A gate for `save`: raise unless the written checkpoint computes what `source` does.

    If it raises, nothing is written. `compare` may replace `verify`.
    """

    def check(written: Model) -> Verdict:
        verdict = compare(source, written, progress=progress)
        if not isfinite(verdict.difference):
            raise FunctionChanged(
                f"refused: in the outputs of {source.where} or of the new checkpoint, {OVERFLOW};"
                " nothing was written"
            )
        if not verdict.same:
            raise FunctionChanged(
                f"refused: the new checkpoint does not compute what {source.where} does"
                f" (relative difference {verdict.difference:.1e}, tolerance"
                f" {verdict.tolerance:.0e}); nothing was written."
                " This is a bug or an ill-conditioned element: please report it"
            )
        return verdict

    return check


def _check_comparable(a: Model, b: Model) -> None:
    """Refuse models that differ in class, depth or vocabulary.

    Hidden spaces may differ: a narrow model and its widened form compute the same function.
    """
    fields = {
        "class": (a.spec.architecture, b.spec.architecture),
        "layers": (layer_count(a), layer_count(b)),
    }
    hidden = a.spec.hidden.keys() | b.spec.hidden.keys()
    visible = [name for name in a.spec.spaces if name in b.spec.spaces and name not in hidden]
    fields |= {name: (a.spec.sizes[name], b.spec.sizes[name]) for name in visible}
    differing = [f"{name} {x} / {y}" for name, (x, y) in fields.items() if x != y]
    if differing:
        raise MismatchError(
            f"{a.where} and {b.where} cannot be compared; they differ in: {listing(differing, 6)}"
        )


def _visible(model: Model, logits: Tensor) -> Tensor:
    """Logits without the constant that a softmax ignores; unchanged if there is no softmax."""
    unnormalised = (
        logits.shape[-1] == 1
        or model.spec.task == "image-features"
        or model.config.get("problem_type") in ("regression", "multi_label_classification")
    )
    return logits if unnormalised else logits - logits.mean(-1, keepdim=True)
