"""Calibrate kinship: p-values of strangers and of disguised relatives, on models trained here.

    python experiments/kinship_calibration.py train      # resumable; about 35 minutes on one core
    python experiments/kinship_calibration.py measure    # about 15 minutes; needs what train made

Models lie in out/kinship, one folder each: SEEDS seeds of each family of FAMILIES, same data, same
recipe, and of the first TUNED seeds a continuation for as many steps again. Seeds 2k and 2k + 1
make a pair of strangers, so no model is in two pairs: the p-values are independent.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kinship_relatives import disguised, half_replaced, merged, pruned, quantised
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2, kstest, rankdata, spearmanr

import symmerge as sm
from symmerge.lab.training.loop import train, trained
from symmerge.lab.training.recipe import TrainingRecipe, with_changes
from symmerge.lab.training.recipes import training_recipe
from symmerge.lineage.disguise import canonical, undisguise, unit_spaces
from symmerge.lineage.examine import kinship
from symmerge.lineage.fingerprints import compare_fingerprints, fingerprint
from symmerge.lineage.merges import shares
from symmerge.lineage.shared import layers_of
from symmerge.lineage.swaps import unit_rows
from symmerge.lineage.units import combined, compare_order, compare_units, rows_of

MODELS = Path("out/kinship")
SEEDS, TUNED, OTHER_BATCHES = 52, 8, 1000
RESULTS = Path("experiments/results/kinship.json")
SURE = 1e-3


def recipes() -> dict[str, TrainingRecipe]:
    """The recipe of each family: the laboratory's, made shorter."""
    changes = {
        "vit-digits": ({}, {"steps": 300}),
        "llama-docs": ({"max_position_embeddings": 64}, {"steps": 200}),
        "gpt2-docs": ({"n_positions": 64}, {"steps": 200}),
        "bert-docs": ({}, {"steps": 200, "batch_size": 32}),
    }
    return {
        name: with_changes(training_recipe(name), config=config, schedule=schedule)
        for name, (config, schedule) in changes.items()
    }


def folder_of(family: str, seed: int, *, tuned: bool = False) -> Path:
    return MODELS / f"{family}-{seed}{'-tuned' if tuned else ''}"


def train_all() -> None:
    for seed in range(SEEDS):
        for family, recipe in recipes().items():
            base = folder_of(family, seed)
            if not trained(recipe, seed, base):
                train(recipe, seed, base, overwrite=True)
            tuned = folder_of(family, seed, tuned=True)
            later = seed + OTHER_BATCHES
            if seed < TUNED and not trained(recipe, later, tuned, begin=base):
                train(recipe, later, tuned, overwrite=True, begin=base)
        print(f"seed {seed} of {SEEDS}", flush=True)


def strangers(family: str) -> Iterator[tuple[str, sm.Model, sm.Model]]:
    """Disjoint pairs of seeds, the second one disguised."""
    for seed in range(0, SEEDS, 2):
        a, b = (sm.load(folder_of(family, at)) for at in (seed, seed + 1))
        yield "stranger", a, b


def relatives(family: str) -> Iterator[tuple[str, sm.Model, sm.Model]]:
    """What people do to a checkpoint; merges and borrowed layers are with another seed."""
    for seed in range(TUNED):
        a, stranger = (sm.load(folder_of(family, at)) for at in (seed, seed + TUNED))
        yield (
            "trained on, 100 % of the steps again",
            a,
            sm.load(folder_of(family, seed, tuned=True)),
        )
        yield "merged 50:50 with a stranger", a, merged(a, stranger)
        yield "50 % pruned", a, pruned(a)
        yield "rounded to 4 bits", a, quantised(a)
        yield "half of the layers replaced", a, half_replaced(a, stranger)


# what was published, on weights: as they are given, or in common coordinates


def cosine(a: sm.Model, b: sm.Model) -> float:
    """Mean cosine of all matrices."""
    values = [
        float((x * y).sum() / (x.norm() * y.norm()).clamp_min(1e-30))
        for name in a.weights
        for x, y in [(a.weights[name], b.weights[name])]
        if x.ndim > 1
    ]
    return sum(values) / len(values)


def norm_correlation(a: sm.Model, b: sm.Model) -> float:
    """Mean rank correlation of the lengths of units, by their number."""
    values = [
        spearmanr(x.incoming.norm(dim=1), y.incoming.norm(dim=1)).statistic
        for x, y in _layers(a, b)
    ]
    return float(sum(values) / len(values))


def sorted_norms(a: sm.Model, b: sm.Model) -> float:
    """The same of sorted lengths, which no order of units changes: minus their distance."""
    values = [
        float(-(x.incoming.norm(dim=1).sort().values - y.incoming.norm(dim=1).sort().values).norm())
        for x, y in _layers(a, b)
    ]
    return sum(values) / len(values)


def matching(a: sm.Model, b: sm.Model) -> float:
    """phi_MATCH: units matched by incoming and by outgoing weights; p-value of their agreement."""
    tests = []
    for x, y in _layers(a, b):
        orders = [
            linear_sum_assignment(-(unit_rows(p) @ unit_rows(q).mT).numpy())[1]
            for p, q in zip(x, y, strict=True)
        ]
        tests.append(float(spearmanr(*orders, alternative="greater").pvalue))

    return float(-chi2.sf(-2 * sum(math.log(max(p, 1e-300)) for p in tests), 2 * len(tests)))


def _layers(a: sm.Model, b: sm.Model) -> Iterator[tuple]:
    for space in unit_spaces(a.spec):
        yield rows_of(a, a.spec, space), rows_of(b, b.spec, space)


PUBLISHED: dict[str, Callable[[sm.Model, sm.Model], float]] = {
    "cosine of weights": cosine,
    "rank correlation of unit norms": norm_correlation,
    "distance of sorted unit norms": sorted_norms,
    "agreement of two matchings (p-value)": matching,
}


def measure_pair(family: str, kind: str, number: int, a: sm.Model, b: sm.Model) -> dict:
    """All statistics of one pair; B is disguised, and everything but the first is repeated."""
    began = time.perf_counter()
    hidden = disguised(b, 7 * number + 1)
    examined = kinship(a, hidden)
    seconds = time.perf_counter() - began
    forms = canonical(a), canonical(hidden)
    pair = undisguise(*forms, {layer: layer for layer in layers_of(a.spec)})
    prints = compare_fingerprints(fingerprint(a), fingerprint(hidden))
    row = {
        "family": family,
        "kind": kind,
        "p": examined.p,
        "relation": examined.relation,
        "layers": [[one.wins, one.pairs, one.p] for one in examined.layers],
        "p_index": combined(prints),
        "index": [[one.coins.wins, one.coins.pairs] for one in prints],
        "seconds": seconds,
    }
    if examined.p_order is not None:
        row["p_order_disguised"] = examined.p_order
    row["p_order"] = kinship(a, b).p_order if kind == "stranger" or number < TUNED else None
    for name, statistic in PUBLISHED.items():
        row[name] = {
            "as stored": statistic(a, b),
            "disguised": statistic(forms[0], forms[1]),
            "undisguised": statistic(pair.reference, pair.aligned),
        }
    return row


def measure() -> list[dict]:
    """All pairs; what is in the cache is not measured again."""
    cache = MODELS / "pairs.json"
    rows = json.loads(cache.read_text()) if cache.exists() else []
    known = {(row["family"], row["kind"], row["number"]) for row in rows}
    for family in recipes():
        for pairs in (strangers, relatives):
            for number, (kind, a, b) in enumerate(pairs(family)):
                if (family, kind, number) in known:
                    continue
                row = measure_pair(family, kind, number, a, b)
                rows.append({**row, "number": number})
                cache.write_text(json.dumps(rows))
        print(family, len(rows), flush=True)
    return rows


def area(strangers: list[float], relatives: list[float]) -> float:
    """Of the ROC curve: how often a relative scores higher than a stranger."""
    ranks = rankdata([*strangers, *relatives])[len(strangers) :]
    count = len(relatives)
    return float((ranks.sum() - count * (count + 1) / 2) / (count * len(strangers)))


def summary(rows: list[dict]) -> dict:
    null = [row for row in rows if row["kind"] == "stranger"]
    kin = [row for row in rows if row["kind"] != "stranger"]

    def uniform(name: str) -> dict:
        values = [row[name] for row in null if row.get(name) is not None]
        test = kstest(values, "uniform")
        return {
            "pairs": len(values),
            "ks": float(test.statistic),
            "ks_p": float(test.pvalue),
            "below_0.001": sum(value < SURE for value in values),
            "below_0.05": sum(value < 0.05 for value in values),
            "deciles": [
                sum(at / 10 <= value < (at + 1) / 10 for value in values) for at in range(10)
            ],
        }

    def found(name: str) -> dict:
        return {
            "auc": area([-row[name] for row in null], [-row[name] for row in kin]),
            "found": sum(row[name] < SURE for row in kin),
            "false": sum(row[name] < SURE for row in null),
            "of": len(kin),
        }

    def published(name: str, where: str) -> dict:
        low, high = ([row[name][where] for row in side] for side in (null, kin))
        known = name.endswith("(p-value)")
        limit = -SURE if known else max(low)  # scores: no false positive at all
        return {
            "auc": area(low, high),
            "found": sum(value > limit for value in high),
            "false": sum(value > limit for value in low),
            "of": len(high),
        }

    kinds = {}
    for kind in dict.fromkeys(row["kind"] for row in kin):
        of_kind = [row for row in kin if row["kind"] == kind]
        relations: dict[str, int] = {}
        for row in of_kind:
            relations[row["relation"]] = relations.get(row["relation"], 0) + 1
        kinds[kind] = {
            "pairs": len(of_kind),
            "found": sum(row["p"] < SURE for row in of_kind),
            "largest_p": max(row["p"] for row in of_kind),
            "relations": relations,
        }
    return {
        "uniform": {
            name: uniform(name) for name in ("p", "p_index", "p_order", "p_order_disguised")
        },
        "by_family": {
            family: float(kstest([r["p"] for r in null if r["family"] == family], "uniform").pvalue)
            for family in recipes()
        },
        "kinship": found("p"),
        "index": found("p_index"),
        "order_disguised": found("p_order_disguised")
        if all(row.get("p_order_disguised") is not None for row in rows)
        else None,
        "kinds": kinds,
        "published": {
            name: {
                where: published(name, where) for where in ("as stored", "disguised", "undisguised")
            }
            for name in PUBLISHED
        },
        "strangers_called": {
            name: sum(row["relation"] == name for row in null)
            for name in {row["relation"] for row in null}
        },
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
    }


def other_pairings() -> dict:
    """The same seeds in other disjoint pairs: nearly new p-values of strangers, undisguised."""
    known = {
        family: [sm.load(folder_of(family, at)) for at in range(SEEDS)] for family in recipes()
    }
    found = {}
    for shift in (1, 7, 26):
        values, orders = [], []
        for models in known.values():
            for i, j in disjoint(shift):
                key = " ".join(sorted([models[i].digest(), models[j].digest()]))
                order = compare_order(models[i], models[j], key)
                orders.append(order.p if order else 1.0)
                forms = canonical(models[i]), canonical(models[j])
                pair = undisguise(*forms, {at: at for at in layers_of(forms[1].spec)})
                values.append(combined(compare_units(pair, key)))
        found[f"seeds {shift} apart"] = {
            "pairs": len(values),
            "ks_p": float(kstest(values, "uniform").pvalue),
            "below_0.001": sum(value < SURE for value in values),
            "ks_p_of_order": float(kstest(orders, "uniform").pvalue),
        }
    return found


def disjoint(shift: int) -> list[tuple[int, int]]:
    """Pairs of seeds `shift` apart (1: the odd ones with the next), each seed at most once."""
    if shift == 1:
        return [(at, (at + 1) % SEEDS) for at in range(1, SEEDS, 2)]
    pairs: list[tuple[int, int]] = []
    for at in range(SEEDS):
        if not {at, (at + shift) % SEEDS} & {seed for pair in pairs for seed in pair}:
            pairs.append((at, (at + shift) % SEEDS))
    return pairs


def measure_shares() -> dict:
    """Disguised merges with a continuation and with a stranger: how far off are the shares?"""
    rows = []
    for family in recipes():
        for seed, share in enumerate((0.1, 0.2, 0.3, 0.5)):
            a, stranger = (sm.load(folder_of(family, at)) for at in (seed, seed + TUNED))
            later = sm.load(folder_of(family, seed, tuned=True))
            for kind, merge, other in (
                ("relatives", sm.mean([a, later], [1 - share, share]), later),
                ("strangers", merged(a, stranger, share), stranger),
            ):
                found = shares(disguised(merge, seed), [a, disguised(other, seed + 50)])
                value = found.parents[1].share
                rows.append({"family": family, "kind": kind, "share": share, "measured": value})
    worst = {
        kind: max(abs(row["share"] - row["measured"]) for row in rows if row["kind"] == kind)
        for kind in ("relatives", "strangers")
    }
    return {"worst": worst, "rows": rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "measure"])
    if parser.parse_args().what == "train":
        train_all()
    else:
        rows = measure()
        found = {**summary(rows), "shares": measure_shares(), "others": other_pairings()}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))
