"""The verdict: what a page says first, in a few plain sentences beside the key figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.results import SimplexFile
from symmerge.lineage.results import Kinship
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.merging.verdict_words import AS_GOOD, STILL_USABLE
from symmerge.models.alignment_results import SolutionFile
from symmerge.report import experiment, phrases
from symmerge.report.names import joined, model_names
from symmerge.report.phrases import NO_BARRIER, short_number
from symmerge.report.results import PLAIN, ROLES, CurveSummary, Results

TITLES = {
    "better": "The merge is better than its parents.",
    "good": "The merge is about as good as its parents.",
    "usable": "The merge works, but is worse than its parents.",
    "poor": "The merge is much worse than its parents.",
}
LEVELS = ("better", *TITLES)
REPAIRED = "of the damage of averaging repaired"
Values = Mapping[str, float]
"""Metric -> value."""


@dataclass(frozen=True)
class KeyFigure:
    """A number that is written large, what it is, and another number beside it."""

    value: str
    label: str
    note: str = ""
    role: str = ""


@dataclass(frozen=True)
class Headline:
    """The verdict of one folder; `level` is one of LEVELS where a merge was measured."""

    title: str
    sentences: tuple[str, ...] = ()
    figures: tuple[KeyFigure, ...] = ()
    level: str = ""
    next: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """In a line of an overview: what is repaired, if that is known."""
        first = self.figures[0] if self.figures else None
        return f"{first.value} {first.label}" if first and first.label == REPAIRED else self.title


@dataclass(frozen=True, kw_only=True)
class MergeComparison:
    """Merges beside their parents, by every metric; `merges`: name -> label, values."""

    names: Sequence[str]
    parents: Sequence[Values]
    merges: Mapping[str, tuple[str, Values]]
    ensemble: Values | None
    metrics: Sequence[str]
    pairs: int = 1

    @property
    def parents_mean(self) -> Values:
        """The mean of the parents, by every metric."""
        return {name: fmean(parent[name] for parent in self.parents) for name in self.metrics}

    @property
    def best(self) -> str:
        """The merge of the lowest loss; plain averaging is one of them."""
        return min(self.merges, key=lambda name: _rank(self._loss(name)))

    @property
    def repaired(self) -> float | None:
        """Share of the damage of plain averaging that the best merge repairs, if it does any."""
        if PLAIN not in self.merges:
            return None
        damage = self._loss(PLAIN) - self.parents_mean["loss"]
        left = self._loss(self.best) - self.parents_mean["loss"]
        return 1 - left / damage if isfinite(damage + left) and damage > NO_BARRIER else None

    def _loss(self, name: str) -> float:
        return self.merges[name][1]["loss"]


def headline(results: Results) -> Headline:
    """The verdict of a folder: the stored one, or what its results say."""
    if results.verdict:
        return _stored(results.verdict)
    if results.curve:
        return _curve(results.curve)
    if results.simplex:
        return compare(_many(results.simplex))
    if results.experiment:
        return _experiment(results)
    if results.kinship:
        return _kinship(results.kinship)
    if results.solution:
        return _solution(results.solution, results.names)
    assert results.universe, "a folder has a main file"
    count = len(results.universe.models)
    return Headline(
        f"{count} models in common coordinates; no loss was measured.",
        (phrases.universe_summary(results.universe),),
    )


def _stored(verdict: MergeVerdict) -> Headline:
    metrics = verdict.task.metrics
    rows = (_key_figure(row.name, row.metrics, metrics, ROLES[row.kind]) for row in verdict.rows)
    figures = (*_repaired_figure(verdict.repaired), *rows)
    title, *sentences = verdict.sentences or (TITLES.get(verdict.verdict, "A merge"),)
    level = verdict.verdict if verdict.verdict in LEVELS else ""
    return Headline(title, tuple(sentences), figures, level, verdict.next)


def _curve(curve: CurveSummary) -> Headline:
    if 0 < curve.midpoint < len(curve.t) - 1:
        return compare(_midpoints(curve))
    return Headline("Only the two models were measured, and nothing between them.")


def _midpoints(curve: CurveSummary) -> MergeComparison:
    def values(at: Mapping[str, Estimate]) -> Values:
        return {metric: at[metric].mean for metric in curve.metrics}

    ends = curve.parents
    return MergeComparison(
        names=curve.names,
        parents=[values(end) for end in ends],
        merges={m.name: (m.label, values(m.points[curve.midpoint])) for m in curve.methods},
        ensemble=values(curve.ensemble) if curve.ensemble else None,
        metrics=curve.metrics,
        pairs=len(curve.pairs),
    )


def _many(simplex: SimplexFile) -> MergeComparison:
    first = simplex.methods[0]
    names = model_names([model.where for model in simplex.models])
    return MergeComparison(
        names=names if len(names) <= 3 else [f"all {len(names)} models"],
        parents=first.ends,
        merges={m.name: (m.label, m.means[-1].metrics) for m in simplex.methods},
        ensemble=first.ensemble,
        metrics=("loss", *(metric for metric in simplex.task.metrics if metric != "loss")),
    )


def compare(merges: MergeComparison) -> Headline:
    """How good the best merge is: beside its parents, plain averaging and the ensemble."""
    excess = merges.merges[merges.best][1]["loss"] - merges.parents_mean["loss"]
    level = "good" if excess <= AS_GOOD else "usable" if excess <= STILL_USABLE else "poor"
    title = _title(merges, excess, level)
    sentences = (*_damage(merges), *_repair(merges), *_ensemble(merges))
    return Headline(title, sentences, tuple(_figures(merges)), level)


def _title(merges: MergeComparison, excess: float, level: str) -> str:
    subject = "The best merge" if len(merges.merges) > 1 else "The merge"
    if not isfinite(excess):
        return f"{subject} does not work: its loss overflows."
    if merges.merges[merges.best][1]["loss"] < min(one["loss"] for one in merges.parents):
        return f"{subject} is better than {'both' if len(merges.parents) == 2 else 'all'} parents."
    if level == "good":
        almost = "as good" if excess <= NO_BARRIER else "almost as good"
        return f"{subject} is {almost} as its parents."
    return TITLES[level].replace("The merge", subject)


def _damage(merges: MergeComparison) -> list[str]:
    """What averaging the models as they are does, and what it does after alignment."""
    before, over = short_number(merges.parents_mean["loss"]), ""
    subject = f"Averaging {joined(merges.names)}"
    if merges.pairs > 1:
        subject, over = "Averaging two models", f", on average over {merges.pairs} pairs"
    label, values = merges.merges[merges.best]
    if PLAIN not in merges.merges:
        after = short_number(values["loss"])
        return [f"{subject} after {label} gives a loss of {after}{over}; theirs is {before}."]
    plain = merges.merges[PLAIN][1]["loss"]
    said = f"{subject} as they are {_effect(merges.parents_mean['loss'], plain)}{over}"
    others = {name: merge for name, merge in merges.merges.items() if name != PLAIN}
    if not others:
        return [f"{said}."]
    label, values = min(others.values(), key=lambda merge: _rank(merge[1]["loss"]))
    return [f"{said}; after alignment ({label}) the loss is {short_number(values['loss'])}."]


def _effect(before: float, after: float) -> str:
    if not isfinite(after):
        return "makes the loss overflow"
    if after - before <= NO_BARRIER:
        return f"does not raise the loss ({short_number(before)} before, {short_number(after)})"
    return f"raises the loss from {short_number(before)} to {short_number(after)}"


def _repair(merges: MergeComparison) -> list[str]:
    if len(merges.merges) == 1 or PLAIN not in merges.merges:
        return []
    if merges.best == PLAIN:
        return ["Alignment does not help here: the plain average is the best."]
    if merges.repaired is None:
        return []
    return [f"Alignment repairs {share_text(merges.repaired)} of the damage of averaging."]


def _ensemble(merges: MergeComparison) -> list[str]:
    if not merges.ensemble or not isfinite(merges.ensemble["loss"]):
        return []
    loss, count = short_number(merges.ensemble["loss"]), len(merges.parents)
    all_models = "both models" if count == 2 else f"all {count} models"
    return [f"The ensemble, which runs {all_models}, has {loss}."]


def share_text(share: float) -> str:
    """Percent; never 100 where something is left.

    >>> share_text(0.9991), share_text(1.2), share_text(0.501)
    ('over 99 %', '100 %', '50 %')
    """
    if 0.99 < share < 1:
        return "over 99 %"
    return f"{min(share, 1.0):.0%}".replace("%", " %")


def _figures(merges: MergeComparison) -> list[KeyFigure]:
    """The large numbers: the share repaired, then losses, best first where it is no parent."""
    metrics, best = merges.metrics, merges.best
    rows = [_key_figure("parents, mean", merges.parents_mean, metrics, "parent")]
    if PLAIN in merges.merges:
        rows.append(_key_figure("plain average", merges.merges[PLAIN][1], metrics, "plain"))
    if best != PLAIN:
        label, values = merges.merges[best]
        rows.insert(0, _key_figure(f"best merge: {label}", values, metrics, "best"))
    if merges.ensemble:
        rows.append(_key_figure("ensemble", merges.ensemble, metrics, "ensemble"))
    return [*_repaired_figure(merges.repaired if best != PLAIN else None), *rows]


def _repaired_figure(share: float | None) -> list[KeyFigure]:
    if share is None:
        return []
    return [KeyFigure(share_text(share), REPAIRED, role="best")]


def _key_figure(label: str, values: Values, metrics: Sequence[str], role: str) -> KeyFigure:
    other = next((name for name in metrics if name != "loss" and name in values), None)
    beside = f" · {phrases.metric_text(other)} {short_number(values[other])}" if other else ""
    return KeyFigure(short_number(values["loss"]), label, f"loss{beside}", role)


def _experiment(results: Results) -> Headline:
    record = results.experiment
    assert record
    below, compared = experiment.at_or_below(record)
    if not compared:
        return Headline(experiment.summary(record))
    title = f"{below} of {compared} numbers lie at or below the published ones."
    return Headline(title, (experiment.summary(record),))


def _kinship(kinship: Kinship) -> Headline:
    title, *sentences = kinship.sentences
    figures = (
        KeyFigure(
            short_number(kinship.p), "probability by chance", "p-value of independence", "best"
        ),
        KeyFigure(short_number(kinship.after), "likeness, undisguised", "median cosine", "rest"),
    )
    return Headline(title, tuple(sentences), figures)


def _solution(solution: SolutionFile, names: Sequence[str]) -> Headline:
    before, after = short_number(solution.distance_before), short_number(solution.distance_after)
    title = (
        f"After alignment {names[1]} has the coordinates of {names[0]}, and the same function as"
        " before."
    )
    if solution.already_aligned:
        title = f"{joined(names)} were aligned to begin with."
    figures = (
        KeyFigure(after, "apart after alignment", "relative to the weights", "best"),
        KeyFigure(before, "apart as they were", "relative to the weights", "plain"),
    )
    return Headline(title, (phrases.solution_summary(solution, names),), figures)


def _rank(loss: float) -> float:
    return loss if isfinite(loss) else inf
