"""What align and merge do with three models or more, and with ways to combine that are more than a mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from symmerge.aligning.many import AlignedMany, align_many
from symmerge.aligning.many import write as write_many
from symmerge.aligning.pair import Aligned
from symmerge.aligning.pair import align as solve
from symmerge.aligning.vocabularies import align_spelled, respell, verify_shared
from symmerge.checkpoints.files import write_text
from symmerge.cli import console, options
from symmerge.errors import MismatchError
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.matching.universes import ROUNDS, Universe, cycle_error
from symmerge.merging import mergekit
from symmerge.merging.combining import METHODS, combine, normalised
from symmerge.merging.means import Attention
from symmerge.merging.soups import soup
from symmerge.models.model import Model
from symmerge.verification.verdict import Verdict, verify

SOUP = "soup"
COMBINE = (*METHODS, SOUP)


def check(count: int, reference: str, rounds: int | None, recipe: Path | None = None) -> None:
    """Refuse options that only many models have, before any work."""
    if count == 2 and (reference != "0" or rounds is not None):
        raise MismatchError(
            "--reference and --rounds are for three models or more: of two, the first is the reference"
        )
    options.reference_of(reference, range(count))
    if recipe and not recipe.absolute().parent.is_dir():
        raise MismatchError(
            f"--mergekit {recipe}: there is no folder {recipe.absolute().parent}; make it first"
        )


def shares_of(weights: str | None, t: float | None, models: Sequence[Model]) -> tuple[float, ...]:
    """How much each model counts; what does not sum to one is normalised, and said."""
    count = len(models)
    if weights is None:
        if t is not None and count > 2:
            raise MismatchError(
                f"-t {t:g} is a place between two models, and there are {count}: give --weights"
            )
        return (
            (1 - (0.5 if t is None else t), 0.5 if t is None else t)
            if count == 2
            else (1 / count,) * count
        )
    if t is not None:
        raise MismatchError("-t and --weights say the same twice: leave one out")
    try:
        given = [float(word) for word in weights.split(",")]
    except ValueError:
        raise MismatchError(
            f"--weights {weights}: write one number per model, with commas: 0.5,0.3,0.2"
        ) from None
    return tuple(normalised(models, given))


@dataclass(frozen=True)
class Plan:
    """How aligned models become one."""

    method: str
    shares: tuple[float, ...]
    density: float
    held_out: str | None
    seed: int
    device: str

    def check(
        self, models: Sequence[Model], *, at: bool, attention: Attention | str, repair: str | None
    ) -> None:
        """Refuse what does not go together, before any work."""
        options.choice("--combine", self.method, COMBINE)
        plain = len(models) == 2 and self.method == "mean"
        if (at or attention != "factors") and not plain:
            raise MismatchError(
                "--at and --attention are for the mean of two models: leave them out"
            )
        if self.method == "slerp" and len(models) > 2:
            raise MismatchError(
                f"--combine slerp goes from one model to another, and there are {len(models)}: use mean, ties or dare"
            )
        if (self.method == SOUP) != (self.held_out is not None):
            raise MismatchError(
                "--combine soup is chosen by --held-out DATA: give both, or neither"
            )
        if repair and self.method != "mean":
            raise MismatchError(
                f"--repair brings a mean back to its parents' spread: {self.method} is none; leave it out"
            )

    def without(self, found: Universe) -> Plan:
        """The plan for those who could be aligned."""
        shares = [self.shares[number] for number in found.members]
        return replace(self, shares=tuple(share / sum(shares) for share in shares))

    def merged(self, models: Sequence[Model], evidence: Mapping[str, Any] | None) -> Model:
        """One model."""
        if self.method != SOUP:
            return combine(
                models,
                self.method,
                self.shares,
                density=self.density,
                seed=self.seed,
                evidence=evidence,
            )
        task = options.inputs(models, self.held_out or "", seed=self.seed, device=self.device)
        made, tried = soup(
            models, task, device=self.device, progress=console.note, evidence=evidence
        )
        console.show_table(f"Soup, by the loss on {self.held_out}", tried)
        return made


def spelled(models: Sequence[Model], shared_tokens: bool) -> list[Model]:
    """The models as inputs are read for them: with A's tokenizer, where B is to get its vocabulary."""
    if not shared_tokens:
        return list(models)
    if len(models) > 2:
        raise MismatchError(
            f"--shared-tokens is for two models, and there are {len(models)}: merge two at a time"
        )
    return [models[0], respell(models[1], models[0])]


def pair(
    models: Sequence[Model],
    chosen: Recipe,
    shared_tokens: bool,
    resume_file: ResumeFile | None = None,
) -> tuple[Aligned, Callable[..., Verdict]]:
    """B in A's basin, and what proves that it is B still."""
    a, b = models
    if not shared_tokens:
        return solve(a, b, chosen, progress=console.note, resume_file=resume_file), verify
    found, both = align_spelled(a, b, chosen, progress=console.note, resume_file=resume_file)
    return found, partial(verify_shared, found=both)


def together(
    models: Sequence[Model],
    chosen: Recipe,
    reference: str,
    rounds: int | None,
    resume_file: ResumeFile | None = None,
) -> AlignedMany:
    """All in one basin, with what went on said."""
    where = options.reference_of(reference, models)
    found = align_many(
        models,
        chosen,
        reference=where,
        rounds=ROUNDS if rounds is None else rounds,
        progress=console.note,
        resume_file=resume_file,
    )
    for why in found.universe.left_out.values():
        console.note(f"left out: {why}")
    return found


def align(
    models: Sequence[Model],
    chosen: Recipe,
    out: Path,
    reference: str,
    rounds: int | None,
    resume_file: ResumeFile,
    recipe: Path | None,
    *,
    overwrite: bool,
    json: bool,
    writes: bool,
) -> None:
    """The verb, of three models or more."""
    found = together(models, chosen, reference, rounds, resume_file)
    if not writes:
        return
    with console.progress(
        "writing and verifying", 3 * len(found.models) * len(found.reference.weights.names())
    ) as tick:
        write_many(found, models, out, overwrite=overwrite, progress=tick)
    if not found.universe.interrupted:
        resume_file.remove()
    others = [
        out / f"aligned-{number}"
        for number in found.universe.members
        if number != found.universe.reference
    ]
    hand_over(recipe, [out / "reference", *others])
    if json:
        console.show_json(found.to_file().to_json())
        return
    if found.universe.interrupted:
        console.out.print(
            "interrupted: wrote the best so far; --resume --overwrite goes on", soft_wrap=True
        )
    spreads = found.universe.spreads
    console.out.print(
        f"{len(found.models)} models in the coordinates of {found.reference.where}: spread {spreads[0]:.3f} aligned to it, {spreads[-1]:.3f} after"
        f" {len(spreads) - 1} rounds; the way round any circle of them ends {cycle_error(found.universe):.0e} from where it began; wrote {out}",
        soft_wrap=True,
    )


def hand_over(recipe: Path | None, folders: Sequence[Path]) -> None:
    """A recipe for mergekit, if one is wanted."""
    if recipe is None:
        return
    write_text(recipe, mergekit.recipe([folder.absolute() for folder in folders]))
    console.note(f"wrote {recipe}: mergekit-yaml {recipe} MERGED")
