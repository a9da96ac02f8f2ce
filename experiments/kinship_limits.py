"""What defeats kinship? Noise, long retraining and distillation, on the models of the calibration.

python experiments/kinship_calibration.py train   # makes them, if it has not
python experiments/kinship_limits.py              # about five minutes on one core
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kinship_calibration import MODELS, folder_of, recipes
from kinship_relatives import disguised
from torch.nn import functional

import symmerge as sm
from symmerge.lab.training.loop import train, trained
from symmerge.lab.training.recipe import with_changes
from symmerge.lab.training.splits import load_splits

RESULTS = Path("experiments/results/kinship_limits.json")
NOISES = (0.1, 0.3, 0.5, 0.7, 1.0, 1.5)
TIMES, FAMILY = (2, 4), "vit-digits"
STEPS, RATE, BATCH = 400, 2e-3, 64


def noise() -> list[dict]:
    """Of every size, two models of every family."""
    rows = []
    for share in NOISES:
        for family in recipes():
            values = []
            for seed in range(2):
                a = sm.load(folder_of(family, seed))
                values.append(sm.kinship(a, disguised(a, seed + 60, share)).p)
            rows.append({"noise": share, "family": family, "p": values})
        print(share, rows[-len(recipes()) :], flush=True)
    return rows


def retraining() -> list[dict]:
    """Trained on for so many times the steps of pretraining, at the same rate."""
    rows = []
    for times in TIMES:
        recipe = recipes()[FAMILY]
        longer = with_changes(recipe, schedule={"steps": times * recipe.schedule.steps})
        for seed in (0,):
            base, out = folder_of(FAMILY, seed), MODELS / f"{FAMILY}-{seed}-times-{times}"
            if not trained(longer, seed + 2000, out, begin=base):
                train(longer, seed + 2000, out, overwrite=True, begin=base)
            found = sm.kinship(sm.load(base), disguised(sm.load(out), seed))
            rows.append(
                {
                    "times": times,
                    "seed": seed,
                    "p": found.p,
                    "cosine": found.after,
                    "relation": found.relation,
                    "slope": found.slope,
                }
            )
            print(rows[-1], flush=True)
    return rows


def distillation() -> list[dict]:
    """A student of fresh weights learns its teacher's predictions."""
    import transformers

    rows = []
    recipe = recipes()[FAMILY]
    data = load_splits(recipe, None, None).train
    kind = getattr(transformers, recipe.architecture)
    for seed in range(2):
        teacher = kind.from_pretrained(folder_of(FAMILY, seed)).eval()
        torch.manual_seed(3000 + seed)
        student = kind(kind.config_class(**recipe.config))
        optimizer = torch.optim.AdamW(student.parameters(), RATE)
        agree = 0.0
        for _ in range(STEPS):
            inputs = data.batch(torch.randint(0, len(data.targets), (BATCH,)), None)[0]
            with torch.no_grad():
                target = teacher(**inputs).logits
            logits = student(**inputs).logits
            loss = functional.kl_div(
                logits.log_softmax(-1),
                target.log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            agree = float((logits.argmax(-1) == target.argmax(-1)).double().mean())
        found = sm.kinship(sm.load(folder_of(FAMILY, seed)), disguised(sm.load(student), seed))
        rows.append({"seed": seed, "agreement": agree, "p": found.p, "cosine": found.after})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"distillation": distillation(), "noise": noise(), "retraining": retraining()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
