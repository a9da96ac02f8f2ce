"""The options of a merge after alignment: weights, ways to combine, REPAIR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from symmerge.aligning.choices import check_choice
from symmerge.aligning.inputs import make_inputs
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import Task
from symmerge.matching.learning.targets import Target
from symmerge.merging.combining import METHODS, combine, normalised_weights
from symmerge.merging.healing import HealOptions
from symmerge.merging.means import Attention, average
from symmerge.merging.mergekit_methods import MergekitMerge
from symmerge.merging.rescaling import Part, repair
from symmerge.merging.shares import LR, STEPS, learn_shares
from symmerge.merging.soups import soup
from symmerge.models.interpolation import piece_time
from symmerge.models.model import Model
from symmerge.models.progress import Progress

COMBINE = (*METHODS, "soup")
LEARNED = "learned"  # shares of the parts


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """How to combine aligned models; the options are those of `merge`."""

    t: float | None = None
    weights: Sequence[float] | None = None
    combine: str = "mean"
    density: float = 0.5
    data: str | Task | None = None
    samples: int | None = None
    at: Mapping[str, float] | Literal["learned"] = field(default_factory=dict)
    attention: str = "factors"
    repair: str | None = None
    calibration: str | Task | None = None
    calibration_samples: int | None = None
    heal: int | None = None  # steps
    heal_lr: float | None = None
    target: Target = "auto"  # of healing, and of learned shares
    seed: int = 0
    device: str = "cpu"
    mergekit: MergekitMerge | None = None  # a config that says all of the above

    def check(self, models: Sequence[Model]) -> None:
        """Refuse options that contradict each other, before any work."""
        if self.mergekit is not None:
            self._check_mergekit(self.mergekit)
            return
        check_choice("--combine", self.combine, COMBINE)
        check_choice("--attention", self.attention, get_args(Attention))
        pair_mean = len(models) == 2 and self.combine == "mean"
        if (self.at or self.attention != "factors") and not pair_mean:
            raise MismatchError(
                "--at and --attention are for the mean of two models: leave them out"
            )
        if self.combine == "slerp" and len(models) > 2:
            raise MismatchError(
                f"--combine slerp combines two models, not {len(models)}: use mean, ties or dare"
            )
        if self.combine == "soup" and self.data is None:
            raise MismatchError(
                "--combine soup keeps the models that help on some data: give --data"
            )
        if self.at == LEARNED and self.attention == "circuits":
            raise MismatchError("--at learned learns stock checkpoints: use --attention factors")
        if isinstance(self.at, str) and self.at != LEARNED:
            raise MismatchError(f"at {self.at}: give {LEARNED}, or a t for each part")
        piece_time(models[0].spec, 0.5, {} if isinstance(self.at, str) else self.at)
        self._check_repair()
        self._check_heal()

    def _check_heal(self) -> None:
        if self.heal is None and self.heal_lr is not None:
            raise MismatchError(f"--heal-lr {self.heal_lr:g}: nothing is healed; add --heal STEPS")
        if self.heal is not None and self.attention == "circuits":
            raise MismatchError(
                "--heal works on stock checkpoints: --attention circuits makes none;"
                " use factors or svd"
            )

    def _check_mergekit(self, config: MergekitMerge) -> None:
        """Refuse options of a merge beside a config that says how to merge."""
        usual = MergePlan()
        for name in ("t", "weights", "combine", "density", "at", "attention", "repair"):
            if getattr(self, name) != getattr(usual, name):
                raise MismatchError(f"{config.file} already says how to merge: leave out --{name}")

    def _check_repair(self) -> None:
        if self.repair is None:
            return
        check_choice("--repair", self.repair, get_args(Part))
        if self.calibration is None and self.data is None:
            raise MismatchError(
                f"--repair {self.repair} needs inputs to measure variances on: give --calibration"
            )
        if self.attention == "circuits":
            raise MismatchError(
                "--repair works on stock checkpoints: --attention circuits makes none;"
                " use factors or svd"
            )
        if self.combine != "mean":
            raise MismatchError(
                f"--repair restores the variance that a mean loses, not that of {self.combine}:"
                " leave it out"
            )

    def shares(self, models: Sequence[Model]) -> list[float]:
        """The weight of each model; they sum to one."""
        if self.mergekit is not None:
            return self.mergekit.shares()
        if self.t is not None and self.weights is not None:
            raise MismatchError("-t and --weights set the same thing: leave one out")
        if self.t is not None and len(models) > 2:
            raise MismatchError(
                f"-t {self.t:g} is a place between two models, not {len(models)}: give --weights"
            )
        if self.t is not None:
            return [1 - self.t, self.t]
        return normalised_weights(models, self.weights)

    def repair_task(self, models: Sequence[Model]) -> Task | None:
        """The inputs for REPAIR: `calibration`, or else `data`."""
        source, samples = self.data, self.samples
        if self.calibration is not None:
            source, samples = self.calibration, self.calibration_samples
        if self.repair is None or source is None:
            return None
        task = self._task(models, source, samples)
        task.check_labels()
        return task

    def heal_options(self, models: Sequence[Model]) -> HealOptions | None:
        """How to heal, with its data; refuses what cannot be healed."""
        if self.heal is None:
            return None
        options = self._learning(models, self.heal, self.heal_lr)
        options.check(models[0], len(models))
        return options

    def _learning(self, models: Sequence[Model], steps: int, lr: float | None) -> HealOptions:
        task = None
        if self.data is not None and self.data != "self":
            task = self._task(models, self.data, self.samples, learned=True)
        how = {"target": self.target, "seed": self.seed, "device": self.device}
        return HealOptions(data=task, steps=steps, lr=lr, **how)  # type: ignore[arg-type]

    def with_shares(
        self, models: Sequence[Model], shares: Sequence[float], progress: Progress | None
    ) -> MergePlan:
        """The same plan with a share for each part, if they are to be learned."""
        if self.at != LEARNED:
            return self
        options = self._learning(models, STEPS, LR)
        a, b = models
        learned = learn_shares(a, b, t=shares[1], options=options, progress=progress)
        return replace(self, at=learned.at)

    def _task(
        self,
        models: Sequence[Model],
        data: str | Task,
        samples: int | None,
        *,
        learned: bool = False,
    ) -> Task:
        if isinstance(data, Task):
            return data
        how = {"seed": self.seed, "device": self.device, "learned": learned}
        how |= {"part": "learn"} if learned else {}  # the rest is for the verdict
        return make_inputs(models, data, samples=samples, **how)  # type: ignore[arg-type]

    def combined(
        self,
        models: Sequence[Model],
        shares: Sequence[float],
        evidence: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Combine models in one basin."""
        if self.mergekit is not None:
            return self.mergekit.combined(models, evidence, seed=self.seed)
        if len(models) == 2 and self.combine == "mean":
            how = {"at": self.at, "attention": self.attention, "evidence": evidence}
            return average(models[0], models[1], shares[1], **how)  # type: ignore[arg-type]
        if self.combine != "soup":
            how = {"density": self.density, "seed": self.seed, "evidence": evidence}
            return combine(models, self.combine, shares, **how)  # type: ignore[arg-type]
        assert self.data is not None
        task = self._task(models, self.data, self.samples)
        return soup(models, task, device=self.device, progress=progress, evidence=evidence)[0]

    def repaired(
        self, merged: Model, parents: Sequence[Model], shares: Sequence[float], task: Task | None
    ) -> Model:
        """The merge after REPAIR, if requested."""
        if task is None:
            return merged
        part = cast(Part, self.repair)
        return repair(merged, parents, task, shares=shares, part=part, device=self.device).model
