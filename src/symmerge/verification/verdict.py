"""Does a model compute what another does? The check, and the gate before anything is written.

Logits are compared up to what a softmax ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from symmerge.checkpoints.json_results import Record
from symmerge.errors import FunctionChanged, MismatchError
from symmerge.models.model import Model, Progress
from symmerge.symmetry.spec import listing
from symmerge.verification.inputs import example_inputs
from symmerge.verification.modules import logits_of

# Storing the weights in a precision changes this much at most, measured over all families and five seeds: 4.6e-15, 2.0e-6, 2.0e-3 and
# 1.2e-2; with room to spare. Independently trained models differ by 0.25 and more.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Verdict(Record):
    """How far two models' logits are apart, and whether that is rounding."""

    same: Annotated[bool, "Whether the difference is within the tolerance."]
    difference: Annotated[float, "|logits A - logits B| over |logits A|."]
    largest: Annotated[float, "Largest difference of a logit."]
    tolerance: Annotated[float, "What counts as rounding in this dtype."]
    dtype: Annotated[str, "Number type of the comparison."]
    inputs: Annotated[str, "Which inputs were compared."]


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

    `difference` is |logits A - logits B| / |logits A| after taking out what a softmax ignores. The default tolerance is that of
    the coarser stored precision. In float64 the norms that transformers computes in float32 are computed in float64.
    """
    _check_comparable(a, b)
    inputs = example_inputs(a, seed)
    first, second = (logits_of(model, inputs, dtype=dtype, progress=progress) for model in (a, b))
    shape = "x".join(str(n) for n in next(iter(inputs.values())).shape)
    kind = "pixels" if "pixel_values" in inputs else "tokens"
    return judge(
        a,
        b,
        first,
        second,
        dtype=dtype,
        tolerance=tolerance,
        inputs=f"{shape} random {kind}, seed {seed}",
    )


def judge(
    a: Model,
    b: Model,
    first: list[Tensor],
    second: list[Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
    inputs: str,
) -> Verdict:
    """Whether logits of two models are the same but for rounding, and for what a softmax ignores."""
    pairs = [(_visible(a, x), _visible(b, y)) for x, y in zip(first, second, strict=True)]
    stored = max((a.dtype, b.dtype, dtype), key=lambda kind: torch.finfo(kind).eps)
    tolerance = TOLERANCE[stored] if tolerance is None else tolerance
    difference = max(((x - y).norm() / x.norm().clamp_min(1e-30)).item() for x, y in pairs)
    largest = max((x - y).abs().max().item() for x, y in pairs)
    return Verdict(
        difference <= tolerance,
        difference,
        largest,
        tolerance,
        str(stored).removeprefix("torch."),
        inputs,
    )


def gate(
    source: Model, *, progress: Progress | None = None, compare: Callable[..., Verdict] = verify
):
    """A gate for `save`: the written checkpoint must compute what `source` does, or nothing is written. `compare` may replace `verify`."""

    def check(written: Model) -> dict[str, Any]:
        verdict = compare(source, written, progress=progress)
        if not verdict.same:
            raise FunctionChanged(
                f"refused: the new checkpoint does not compute what {source.where} does (relative difference {verdict.difference:.1e},"
                f" tolerance {verdict.tolerance:.0e}); nothing was written. This is a bug or an ill-conditioned element: please report it"
            )
        return verdict.to_json()

    return check


def _check_comparable(a: Model, b: Model) -> None:
    """Refuse models of another class, depth or vocabulary. Hidden spaces do not count: a narrow model and its widened twin are one function."""
    fields = {
        "class": (a.spec.architecture, b.spec.architecture),
        "layers": (_layers(a), _layers(b)),
    }
    visible = [
        name
        for name in a.spec.spaces
        if name in b.spec.spaces and name not in a.spec.hidden and name not in b.spec.hidden
    ]
    fields |= {name: (a.spec.sizes[name], b.spec.sizes[name]) for name in visible}
    differing = [f"{name} {x} / {y}" for name, (x, y) in fields.items() if x != y]
    if differing:
        raise MismatchError(
            f"{a.where} and {b.where} cannot be compared; they differ in: {listing(differing, 6)}"
        )


def _layers(model: Model) -> int:
    return sum(name.startswith("ff.") for name in model.spec.spaces)


def _visible(model: Model, logits: Tensor) -> Tensor:
    """Logits less what a softmax ignores; features, regression and multi-label heads are compared as they are."""
    kind = model.config.get("problem_type")
    if (
        logits.shape[-1] == 1
        or model.spec.task == "image-features"
        or kind in ("regression", "multi_label_classification")
    ):
        return logits
    return logits - logits.mean(-1, keepdim=True)
