"""Do two models compute the same function? `verify` runs both.

Logits are compared up to an additive constant, which a softmax ignores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import Verdict
from symmerge.errors import MismatchError
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.models.settings import differing_settings
from symmerge.models.tables import has_decoder, layer_count
from symmerge.symmetry.spec import listing
from symmerge.verification.inputs import Sample, has_few_outputs, longest_input, samples
from symmerge.verification.judging import Judgement, judge, rms
from symmerge.verification.modules import logits_of
from symmerge.verification.rounding import rounded_again
from symmerge.verification.workers import run_all

DRAWS, OF_FEW = 2, 4  # of rounding errors, for each model; for models with few outputs
# Of the logits: rounding that changes them by more excuses nothing beyond it.
EXCUSED = 0.05
NO_SOFTMAX = ("image-text", "image-reconstruction")  # tasks whose outputs are what they are
ALIKE = 0.5  # of the larger noise: both models' draws then count
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
    if a.custom:  # it knows its own inputs
        return a.custom.compare(a, b)
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
    draws: Sequence[int] | None = None,
    ignored: Collection[str] = (),
    all_rounded: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> Verdict:
    """Compare two models on these samples.

    `draws` says how often the rounding of each is simulated (None: as many outputs demand),
    `ignored` which settings may differ. With `all_rounded`, weights that both have were rounded,
    too: nobody looks which they are, which takes as long as reading one of the models.
    So many `workers` run one model each.
    """
    settings = tuple(differing_settings(a, b, ignored))
    draws = draws or [OF_FEW if has_few_outputs(a) else DRAWS] * 2
    samples = [_Runs((a, b), pair, draws, dtype, all_rounded) for pair in pairs]
    results = iter(run_all([job for runs in samples for job in runs.jobs], workers, progress))
    judgements = [
        judgement
        for runs in samples
        for judgement in runs.judged([next(results) for _ in runs.jobs])
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


class _Runs:
    """All runs on one pair of samples: both models, and both with the noise of rounding."""

    def __init__(
        self,
        models: tuple[Model, Model],
        pair: tuple[Sample, Sample],
        draws: Sequence[int],
        dtype: torch.dtype,
        all_rounded: bool,
    ) -> None:
        sides = list(zip(models, pair, draws, strict=True))
        noisy = [
            (rounded_again(model, draw, dtype, other=None if all_rounded else other), sample)
            for (model, sample, count), other in zip(sides, reversed(models), strict=True)
            for draw in range(count)
        ]
        runs = [*noisy, *zip(models, pair, strict=True)]  # the longest first
        self.jobs = [partial(_run, model, sample, dtype) for model, sample in runs]
        self._model, self._sample, self._draws = models[0], pair[0], draws[0]

    def judged(self, results: list[dict[str, Tensor]]) -> Iterator[Judgement]:
        """What the results of the jobs say, output by output."""
        *moved, first, second = results
        noise = (moved[: self._draws], first), (moved[self._draws :], second)
        for name, logits in first.items():
            changes = [[run[name] - plain[name] for run in runs] for runs, plain in noise if runs]
            yield judge(
                logits,
                second[name],
                _unit(changes, logits),
                softmax=has_softmax(self._model, logits),
                what=f"{name} on {self._sample.what}",
                typical=self._sample.typical,
            )


def _run(model: Model, sample: Sample, dtype: torch.dtype, report: Progress) -> dict[str, Tensor]:
    return logits_of(model, sample, dtype=dtype, progress=report)


def _unit(sides: list[list[Tensor]], logits: Tensor) -> list[Tensor]:
    """The noise of the model that rounding moves more, as far as it is excused.

    That of the other is more of the same, where rounding moves both about as far.
    """
    sizes = [rms(torch.stack(draws).double()).item() for draws in sides]
    pairs = zip(sides, sizes, strict=True)
    noise = [change for draws, size in pairs if not size < ALIKE * max(sizes) for change in draws]
    size, limit = rms(torch.stack(noise).double()).item(), EXCUSED * rms(logits.double()).item()
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
        "inputs": (longest_input(a), longest_input(b)),
    }
    if has_decoder(a):  # whose classifier refuses texts without their end
        fields |= {"end of a text": (a.spec.end_token, b.spec.end_token)}
    hidden = a.spec.hidden.keys() | b.spec.hidden.keys()
    visible = [name for name in a.spec.spaces if name in b.spec.spaces and name not in hidden]
    fields |= {name: (a.spec.sizes[name], b.spec.sizes[name]) for name in visible}
    differing = [f"{name} {x} / {y}" for name, (x, y) in fields.items() if x != y]
    if differing:
        raise MismatchError(
            f"{a.where} and {b.where} cannot be compared; they differ in: {listing(differing, 6)}"
        )


def has_softmax(model: Model, logits: Tensor) -> bool:
    """Whether a softmax reads the logits, and ignores a constant added to all."""
    return not (
        logits.shape[-1] == 1
        or model.spec.task.endswith(("-features", "-embedding", "question-answering", *NO_SOFTMAX))
        or model.config.get("problem_type") in ("regression", "multi_label_classification")
    )
