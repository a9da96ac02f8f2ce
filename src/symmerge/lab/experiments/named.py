"""Experiments on models of the hub by name: seeds of Pythia, and the BERTs of MultiBERTs."""

from __future__ import annotations

from collections.abc import Mapping

from symmerge.lab.experiments import correlation
from symmerge.lab.experiments.components import by_scale, lines, models, row
from symmerge.lab.experiments.external import Accepts, NamedModels
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size

WIKITEXT = "hf:Salesforce/wikitext:wikitext-2-raw-v1"  # its validation split is WikiText-103's
LEARNING: Mapping[str, Mapping[str, object]] = {
    "published": {"steps": 500, "start": "weights"},
    "small": {},
}
TRAINED = {"published": "books-neox", "small": "neox-docs"}  # without models of the hub
# row -> recipe; learned rows look at self-generated text unless there is --train-data
SEEDS = {
    "vanilla": "none",
    "git re-basin": "permutations",
    "generalized linear mode connectivity, in stock form": "orthogonal",
    "ours, no data, not learned": "symmerge",
    "ours, learned from self-generated text": "learned",
}
PYTHIA: Mapping[str, NamedModels] = {
    size: NamedModels(
        tuple(f"EleutherAI/pythia-{size}-seed{seed}" for seed in range(1, 10)),
        usual=3,
        test=WIKITEXT,
    )
    for size in ("14m", "31m", "70m", "160m", "410m")
}
MULTIBERTS: Mapping[str, NamedModels] = {
    "base": NamedModels(
        tuple(f"google/multiberts-seed_{seed}" for seed in range(1, 25)),
        usual=5,
        test=WIKITEXT,
        train="python-docs:train",
    )
}
ABOUT = "Highest loss over the straight line between the ends, held-out text; every pair of seeds."
DIFFERS = "No published number: the papers merge other models, or do not print theirs."


def seeds(size: Size) -> tuple[ResultTable, ...]:
    """Every method on every pair of the seeds of one size."""
    learning = by_scale(size, LEARNING)
    cells = models(size, by_scale(size, TRAINED))
    column = size.external.column if size.external else by_scale(size, TRAINED)
    entries = [
        row(name, column, lines(size, cells, method, **(learning if method == "learned" else {})))
        for name, method in SEEDS.items()
    ]
    return (ResultTable("Seeds of one size", tuple(entries), ABOUT, DIFFERS),)


def multiberts(size: Size) -> tuple[ResultTable, ...]:
    """Tables 1 and 2 of correlation-based merging on the models of the paper."""
    return correlation.heads(size) + correlation.stream(size)


EXPERIMENTS: Mapping[str, Experiment] = {
    "pythia-seeds": Experiment(
        "models of one size from different seeds: PolyPythias, by name",
        "PolyPythias, arXiv 2503.09543 (the models)",
        seeds,
        Accepts(),
        named=PYTHIA,
    ),
    "multiberts": Experiment(
        "what heads and the stream may do, on the models of the paper, by name",
        f"{correlation.PAPER}, Tables 1 and 2",
        multiberts,
        Accepts(),
        named=MULTIBERTS,
    ),
}
