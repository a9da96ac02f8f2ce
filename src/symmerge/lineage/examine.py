"""Examine two models: `kinship`."""

from __future__ import annotations

import torch

from symmerge.aligning.equivalence import same
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.distributed import local_device
from symmerge.errors import MismatchError
from symmerge.lineage.depth import match_layers
from symmerge.lineage.disguise import Undisguised, canonical, undisguise, unit_spaces
from symmerge.lineage.likeness import measure_likeness, typical
from symmerge.lineage.relation import EXACT, SURE, Facts, find_relation
from symmerge.lineage.results import Kinship, LayerEvidence, short_names
from symmerge.lineage.shared import layers_of
from symmerge.lineage.traces import has_zeros, measure_traces, on_a_grid
from symmerge.lineage.units import LayerTest, combined, compare_order, compare_units
from symmerge.models.distances import likeness
from symmerge.models.model import Model, device_of
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.models.widening import widen
from symmerge.symmetry.threads import same_bytes


@torch.no_grad()
@same_bytes()
def kinship(
    a: ModelLike, b: ModelLike, *, device: str = "cpu", progress: ProgressLike = None
) -> Kinship:
    """Are two models related, whatever symmetry of the architecture disguises one of them?

    Data-free, and nothing is run. Depths and vocabularies may differ; of two widths the narrower
    model is widened first, where its architecture can be. `device` is where they are aligned.
    """
    say = reporter(progress)
    device_of(device)
    first, second = open_model(a), open_model(b)
    if len(layers_of(first.spec)) > len(layers_of(second.spec)):
        first, second = second, first  # layers are counted by the deeper one
    wide = _as_wide(first, second)
    say(Phase("bringing both models into one coordinate system"))
    forms = canonical(wide[0]), canonical(wide[1])
    sources = match_layers(*forms)
    pair = undisguise(*forms, sources, device=local_device(device))
    if not unit_spaces(pair.spec):
        raise MismatchError(
            f"{first.where} and {second.where} share no feed-forward units, which the test needs:"
            " compare other models"
        )
    say(Phase("comparing what was held out"))
    key = " ".join(sorted(model.digest() for model in (first, second)))
    tests = compare_units(pair, key)
    return _result((first, second), pair, tests, sources, key)


def _result(
    stored: tuple[Model, Model],
    pair: Undisguised,
    tests: tuple[LayerTest, ...],
    sources: dict[int, int],
    key: str,
) -> Kinship:
    a, b = stored
    order = compare_order(a, b, key)
    traces = measure_traces(a, pair) if {*sources} == {*sources.values()} else None
    alike = a.spec.fingerprint == b.spec.fingerprint
    equal = bool(traces and traces.size < EXACT) and a.spec.architecture == b.spec.architecture
    facts = Facts(
        names=short_names(a.where, b.where),
        p=combined(tests),
        p_order=order.p if order else None,
        layers=tuple(_evidence(test, sources) for test in tests),
        cells=measure_likeness(pair),
        traces=traces,
        zeros=(has_zeros(a), has_zeros(b)),
        grids=(on_a_grid(a), on_a_grid(b)),
        widened="" if (narrow := _narrower(a, b)) is None else narrow.where,
        same=equal and a.spec.sizes == b.spec.sizes and same(a, b).same,
    )
    finding = find_relation(facts)
    return Kinship(
        a=a.where,
        b=b.where,
        related=facts.p < SURE,
        relation=finding.relation,
        parent=finding.parent,
        p=facts.p,
        p_order=facts.p_order,
        before=likeness(a, b) if alike else None,
        after=typical(facts.cells),
        slope=finding.slope,
        layers=facts.layers,
        cells=facts.cells,
        sentences=finding.sentences,
    )


def _evidence(test: LayerTest, sources: dict[int, int]) -> LayerEvidence:
    layer = int(test.space.rpartition(".")[2])
    return LayerEvidence(layer, sources[layer], test.coins.wins, test.coins.pairs, test.p)


def _narrower(a: Model, b: Model) -> Model | None:
    """The model with the narrower stream or fewer units; None where both are as wide."""
    common = [name for name in a.spec.hidden if name in b.spec.hidden]
    less = [name for name in common if a.spec.sizes[name] != b.spec.sizes[name]]
    if not less:
        return None
    return a if all(a.spec.sizes[name] < b.spec.sizes[name] for name in less) else b


def _as_wide(a: Model, b: Model) -> tuple[Model, Model]:
    """Both, the narrower one widened where it can be; elsewhere `overlap` says what differs."""
    narrow = _narrower(a, b)
    same_kind = a.spec.architecture == b.spec.architecture
    if narrow is None or not same_kind or layers_of(a.spec) != layers_of(b.spec):
        return a, b
    return (widen(a, b), b) if narrow is a else (a, widen(b, a))
