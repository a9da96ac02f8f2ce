"""Do two models compute the same function? `verify` runs both.

Logits are compared up to an additive constant, which a softmax ignores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import Verdict
from symmerge.errors import MismatchError
from symmerge.models.model import Model, Progress
from symmerge.models.settings import differing_settings
from symmerge.models.tables import layer_count
from symmerge.symmetry.spec import listing
from symmerge.verification.inputs import Sample, samples
from symmerge.verification.judging import Judgement, judge, rms
from symmerge.verification.modules import logits_of
from symmerge.verification.rounding import rounded_again

DRAWS = 2  # of rounding errors, for each model
# Of the logits: rounding that changes them by more excuses nothing beyond it.
EXCUSED = 0.05
SamplePairs = Sequence[tuple[Sample, Sample]]
"""What to run both models on: one sample for each, which may spell the same tokens differently."""


def verify(
    a: Model,
    b: Model,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Whether two models compute the same function, by their settings and on random inputs.

    All positions, windows and token types are reached, and every vocabulary row. `dtype` is the
    precision to compute in; in float64, norms that transformers computes in float32 are computed
    in float64. Differences count as rounding if simulated rounding of these models explains them,
    or up to a `tolerance`.
    """
    check_comparable(a, b)
    pairs = [(sample, sample) for sample in samples(a, seed)]
    sides = a.cached(), b.cached()
    return compare(*sides, pairs, dtype=dtype, tolerance=tolerance, seed=seed, progress=progress)


def compare(
    a: Model,
    b: Model,
    pairs: SamplePairs,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    noisy: Sequence[bool] = (True, True),
    ignored: Collection[str] = (),
    progress: Progress | None = None,
) -> Verdict:
    """Compare two models on these samples.

    `noisy` says whose rounding is simulated, `ignored` which settings may differ.
    """
    settings = tuple(differing_settings(a, b, ignored))
    judgements = [
        judgement
        for pair in pairs
        for judgement in _judgements((a, b), pair, noisy, dtype, progress)
    ]
    worst = max(judgements, key=lambda judgement: judgement.units)
    difference = max(judgement.difference for judgement in judgements)
    explained = worst.units <= 1 if tolerance is None else difference <= tolerance
    return Verdict(
        same=explained and not settings,
        difference=difference,
        largest=max(judgement.largest for judgement in judgements),
        rounding=worst.rounding,
        units=worst.units,
        tolerance=tolerance,
        where=worst.where,
        settings=settings,
        dtype=str(dtype).removeprefix("torch."),
        inputs=f"{', '.join(sample.what for sample, _ in pairs)}, seed {seed}",
    )


def _judgements(
    models: tuple[Model, Model],
    pair: tuple[Sample, Sample],
    noisy: Sequence[bool],
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[Judgement]:
    run = [
        logits_of(model, sample, dtype=dtype, progress=progress)
        for model, sample in zip(models, pair, strict=True)
    ]
    noise = [
        [_moved(model, sample, logits, draw, dtype, progress) for draw in range(DRAWS)]
        for model, sample, logits, wanted in zip(models, pair, run, noisy, strict=True)
        if wanted
    ]
    for name, first in run[0].items():
        sides = [[logits[name] for logits in draws] for draws in noise]
        yield judge(
            first,
            run[1][name],
            _unit(sides, first),
            softmax=_has_softmax(models[0], first),
            what=f"{name} on {pair[0].what}",
        )


def _moved(
    model: Model,
    sample: Sample,
    logits: dict[str, Tensor],
    draw: int,
    dtype: torch.dtype,
    progress: Progress | None,
) -> dict[str, Tensor]:
    """What one rounding of the weights does to the logits."""
    noisy = logits_of(rounded_again(model, draw, dtype), sample, dtype=dtype, progress=progress)
    return {name: noisy[name] - logits[name] for name in logits}


def _unit(sides: list[list[Tensor]], logits: Tensor) -> list[Tensor]:
    """The noise of the model that rounding moves more, as far as it is excused."""
    sizes = [rms(torch.stack(draws).double()).item() for draws in sides]
    size = max(sizes)
    noise, limit = sides[sizes.index(size)], EXCUSED * rms(logits.double()).item()
    return noise if not size > limit else [change * (limit / size) for change in noise]


def describe(verdict: Verdict) -> str:
    """The figures of a verdict in a sentence."""
    settings = f"settings differ: {'; '.join(verdict.settings)}; " if verdict.settings else ""
    limit = (
        f"one rounding makes {verdict.rounding:.1e}"
        if verdict.tolerance is None
        else f"tolerance {verdict.tolerance:.0e}"
    )
    return (
        f"{settings}relative logit difference {verdict.difference:.2e}, {limit};"
        f" {verdict.units:.2g} times what rounding explains, in {verdict.where}"
    )


def check_comparable(a: Model, b: Model) -> None:
    """Refuse models that differ in class, depth or vocabulary.

    Hidden spaces may differ: a narrow model and its widened form compute the same function.
    """
    fields = {
        "class": (a.spec.architecture, b.spec.architecture),
        "task": (a.spec.task, b.spec.task),
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


def _has_softmax(model: Model, logits: Tensor) -> bool:
    """Whether a softmax reads the logits, and ignores a constant added to all."""
    return not (
        logits.shape[-1] == 1
        or model.spec.task == "image-features"
        or model.config.get("problem_type") in ("regression", "multi_label_classification")
    )
