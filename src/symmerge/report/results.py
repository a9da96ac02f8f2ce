"""Read the result files of a folder; summarize several pairs as means with standard errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from symmerge.checkpoints.json_results import AnyFile, read_result
from symmerge.checkpoints.provenance import Provenance
from symmerge.errors import SymmergeError
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.experiment_results import AmountFile, ExperimentFile
from symmerge.evaluation.lines import mean_metrics
from symmerge.evaluation.results import (
    CurveFile,
    CurvesFile,
    MethodLine,
    PairRecord,
    SimplexFile,
    TaskRecord,
)
from symmerge.lineage.results import Kinship
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.structure import StructureFile
from symmerge.observation.correlations import Correlations
from symmerge.report.names import pair_names

# A page needs at least one of these files.
MAIN_FILES = ("curve.json", "simplex.json", "solution.json", "universe.json", "results.json")
MAIN_FILES += ("verdict.json", "kinship.json")
PLAIN = "none"  # the method name of the plain average
# Kind of a row of verdict.json -> how the page shows it.
ROLES = {"parent": "parent", "average": "plain", "merge": "best"}
ROLES |= {"unhealed": "", "ensemble": "ensemble"}


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """One method: every metric at every t, both barriers, and the objective of each pair."""

    name: str
    label: str
    points: tuple[Mapping[str, Estimate], ...]
    barrier_mean: Estimate
    barrier_linear: Estimate
    barriers: tuple[float, ...]  # over the mean, of each pair
    settings: Mapping[str, object]
    objectives: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CurveSummary:
    """The line between two models, or the mean over several pairs."""

    task: TaskRecord
    metrics: tuple[str, ...]  # the loss first
    pairs: tuple[PairRecord, ...]
    t: tuple[float, ...]
    methods: tuple[MethodSummary, ...]
    ensemble: Mapping[str, Estimate] | None
    versions: Mapping[str, str]

    @property
    def midpoint(self) -> int:
        """Index of the point closest to t = 0.5."""
        return min(range(len(self.t)), key=lambda at: abs(self.t[at] - 0.5))

    @property
    def names(self) -> list[str]:
        """Names of the two models; of several pairs, which of the two."""
        pair, *others = self.pairs
        if others:
            return ["first model", "second model"]
        return pair_names([pair.a.where, pair.b.where])

    @property
    def parents(self) -> tuple[Mapping[str, Estimate], Mapping[str, Estimate]]:
        """Metrics of both models; the ends of a method that is no symmetry are others."""
        method = next((one for one in self.methods if one.name == PLAIN), self.methods[0])
        return method.points[0], method.points[-1]

    @property
    def ranked(self) -> tuple[MethodSummary, ...]:
        """The methods by their loss at the midpoint, lowest first; overflows last."""
        return tuple(sorted(self.methods, key=self._midpoint_loss))

    @property
    def best(self) -> MethodSummary | None:
        """The method of the lowest loss at the midpoint, unless plain averaging has it."""
        first = self.ranked[0]
        return None if first.name == PLAIN else first

    def _midpoint_loss(self, method: MethodSummary) -> float:
        loss = method.points[self.midpoint]["loss"].mean
        return loss if isfinite(loss) else inf


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a folder; missing files are None, but at least one of MAIN_FILES exists."""

    folder: Path
    curve: CurveSummary | None
    simplex: SimplexFile | None
    solution: SolutionFile | None
    universe: UniverseFile | None
    structure: StructureFile | None
    correlations: Correlations | None
    amount: AmountFile | None
    experiment: ExperimentFile | None
    verdict: MergeVerdict | None
    kinship: Kinship | None
    names: tuple[str, str]


def read_results(folder: Path) -> list[Results]:
    """The results of a folder with a main file, or of each of its subfolders with one."""
    if not folder.is_dir():
        raise SymmergeError(
            f"{folder} is not a folder: give the one that symmerge barrier or align wrote"
        )
    if any((folder / name).exists() for name in MAIN_FILES):
        return [_read_folder(folder)]
    folders = sorted({file.parent for name in MAIN_FILES for file in folder.glob(f"*/{name}")})
    if not folders:
        raise SymmergeError(
            f"{folder} holds no results (no {', no '.join(MAIN_FILES)}): give the folder that"
            " symmerge barrier, merge, align or experiment wrote"
        )
    return [_read_folder(subfolder) for subfolder in folders]


def _read_folder(folder: Path) -> Results:
    curves = _read(folder / "curve.json", CurveFile, CurvesFile)
    return Results(
        folder=folder,
        curve=summarize(curves) if curves else None,
        simplex=_read(folder / "simplex.json", SimplexFile),
        solution=_read(folder / "solution.json", SolutionFile),
        universe=_read(folder / "universe.json", UniverseFile),
        structure=_read(folder / "structure.json", StructureFile),
        correlations=_read(folder / "correlations.json", Correlations),
        amount=_read(folder / "amount.json", AmountFile),
        experiment=_read(folder / "results.json", ExperimentFile),
        verdict=_read(folder / "verdict.json", MergeVerdict),
        kinship=_read(folder / "kinship.json", Kinship),
        names=_names(folder, curves),
    )


def _names(folder: Path, curves: CurveFile | CurvesFile | None) -> tuple[str, str]:
    """Names of the reference and of the aligned model."""
    if isinstance(curves, CurveFile):
        places = [curves.models.a.where, curves.models.b.where]
    else:
        files = [folder / name / "symmerge.json" for name in ("reference", "aligned")]
        known = [_read(file, Provenance) for file in files]
        places = [one.source if one else "" for one in known]
    a, b = pair_names(places)
    return a, b


def _read(file: Path, *types: type[AnyFile]) -> AnyFile | None:
    return read_result(file, *types) if file.exists() else None


def summarize(curves: CurveFile | CurvesFile) -> CurveSummary:
    """Summarize one pair, or several as means with standard errors."""
    pairs = curves.pairs if isinstance(curves, CurvesFile) else (curves,)
    first = pairs[0]
    metrics = ("loss", *(metric for metric in first.task.metrics if metric != "loss"))
    ensembles = [pair.ensemble for pair in pairs if pair.ensemble]
    methods = zip(*(pair.methods for pair in pairs), strict=True)
    return CurveSummary(
        task=first.task,
        metrics=metrics,
        pairs=tuple(pair.models for pair in pairs),
        t=first.ts,
        methods=tuple(_summarize_method(lines, metrics) for lines in methods),
        ensemble=mean_metrics(ensembles, metrics) if len(ensembles) == len(pairs) else None,
        versions=first.versions,
    )


def _summarize_method(lines: Sequence[MethodLine], metrics: Sequence[str]) -> MethodSummary:
    places = zip(*(line.points for line in lines), strict=True)
    barriers = tuple(line.barrier_mean for line in lines)
    return MethodSummary(
        name=lines[0].name,
        label=lines[0].label,
        points=tuple(mean_metrics([point.metrics for point in place], metrics) for place in places),
        barrier_mean=Estimate.of(barriers),
        barrier_linear=Estimate.of([line.barrier_linear for line in lines]),
        barriers=barriers,
        settings=lines[0].settings,
        objectives=tuple(line.objective for line in lines if line.objective),
    )
