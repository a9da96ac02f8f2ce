"""Every verb that writes, to be killed: `python killed_verbs.py FOLDER [--kills 50] [--only VERB]`.

Prints one line of JSON per verb, or with --table a table; the exit code says whether all held.
"""

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

from killing import Place, Verb, adopt_orphans, kill_many

QUICK = ("--recipe", "weights-only", "--tries", 1)
THREE = ("--recipe", "symmerge", "--tries", 3)


def verbs(place: Place) -> list[Verb]:
    """The verbs with small inputs; the last one is not atomic, to see that this is noticed."""
    inputs, out = place.root / "inputs", place.work / "out"
    a, b, c = (inputs / f"seed-{seed}" for seed in range(3))
    to = ("--out", out)
    data = ("--data", inputs / "text.txt", "--samples", 4)
    looked_at = ("--calibration", inputs / "text.txt", "--calibration-samples", 4)
    start = ("--start-from", "weights", "--tries", 1)
    learned = ("--method", "learned", *data, "--steps", 6, *start)
    soft = ("--recipe", "soft-hardened", *data, "--steps", 6, *start)
    measured = ("--task", "clm", *data, "--points", 3, "--method", "none,permutations")
    external = ("--models", a, b, "--test-data", inputs / "text.txt")
    external += ("--train-data", inputs / "more.txt", "--size", "smoke", "--workers", 1)
    carry = ("--from", a, "--tuned", inputs / "tuned", "--to", b)
    resume, shards = ("--resume",), ("--max-shard-size", 0.00005)
    page = place.work / "line" / "page.html"
    return [
        Verb("random", ("random", a, *to, "--seed", 1)),
        Verb(
            "random, overwriting",
            ("random", a, *to, "--seed", 2, "--overwrite"),
            overwrites=False,
            older=inputs / "older",
        ),
        Verb("canonical", ("canonical", a, *to)),
        Verb("apply", ("apply", inputs / "older" / "alignment.safetensors", a, *to)),
        Verb("canonical, sharded", ("canonical", a, *to, *shards), long=True),
        Verb(
            "align weights",
            ("align", a, b, *to, *THREE, "--mergekit", place.work / "mergekit.yaml"),
            again=resume,
            long=True,
        ),
        Verb(
            "align activations",
            ("align", a, b, *to, "--method", "activations", *data, "--tries", 2),
            again=resume,
            long=True,
        ),
        Verb("align learned", ("align", a, b, *to, *learned), again=resume),
        Verb("align soft", ("align", a, b, *to, *soft), again=resume, long=True),
        Verb(
            "align three",
            ("align", a, b, c, *to, *QUICK, "--rounds", 2),
            again=resume,
            long=True,
        ),
        Verb("merge", ("merge", a, b, *to, *QUICK), again=resume),
        Verb(
            "merge three",
            ("merge", a, b, c, *to, *QUICK, "--combine", "ties", "--rounds", 1),
            again=resume,
            long=True,
        ),
        Verb(
            "transport",
            ("transport", *carry, *to, "--method", "weights-only", "--no-verdict"),
        ),
        Verb("kinship", ("kinship", a, b, *to), overwrites=False, long=True),
        Verb(
            "derive",
            ("derive", "GPT2LMHeadModel", "--out", f"{out}.json"),
            whole=("out.json",),
            overwrites=False,
            long=True,
        ),
        Verb(
            "statistics",
            ("statistics", a, b, *looked_at, "--out", f"{out}.safetensors"),
            whole=("out.safetensors",),
            again=resume,
        ),
        Verb(
            "evaluate",
            ("evaluate", a, b, *data, "--out", f"{out}.json"),
            whole=("out.json",),
        ),
        Verb("barrier", ("barrier", a, b, *measured, *to)),
        Verb(
            "report",
            ("report", place.work / "line", "--out", page),
            whole=("line/page.html",),
            overwrites=False,
            before=partial(shutil.copytree, inputs / "line", place.work / "line"),
        ),
        Verb("train", ("train", "vit-digits", "--steps", 5, *to), again=resume),
        Verb(
            "experiment",
            ("experiment", "sums", "--workers", 2, *to),
            whole=("out/cells/*", "out/results.json", "out/page.html"),
            again=resume,
            overwrites=False,
        ),
        Verb(
            "experiment t-methods",
            ("experiment", "t-methods", *external, *to),
            long=True,
            whole=("out/cells/*", "out/results.json", "out/page.html"),
            again=resume,
            overwrites=False,
        ),
        Verb(
            "demo",
            ("demo", *to),
            whole=("out/models/*", "out/vit-digits", "out/page.html"),
            overwrites=False,
        ),
        Verb("torn", (out,), overwrites=False, run=_torn),
    ]


def _torn(arguments: list[str]) -> None:
    """Not a verb: writes a folder file by file, as no verb may."""
    folder = Path(arguments[0])
    folder.mkdir(exist_ok=True)
    for number in range(50):
        (folder / f"{number}").write_text("x")


def prepare(place: Place) -> None:
    """Imports, small inputs, and settings that make kills meet more writes in less time."""
    import sklearn.datasets  # noqa: F401  half a second in every child that learns digits
    import torch
    from fixtures import checkpoint, run
    from transported import fine_tuned

    torch.set_num_threads(1)
    import symmerge.cli.demo
    import symmerge.cli.experiment  # noqa: F401
    from symmerge.lab.small_models import small_model
    from symmerge.lab.training import loop
    from symmerge.observation import probe

    loop.SAVE_SECONDS = 0.0  # a state at every step, not every minute
    probe.ROWS, probe.LENGTH = 16, 32  # of self-generated text
    inputs = place.root / "inputs"
    (inputs / "text.txt").write_text("One short text, read again and again. " * 80)
    (inputs / "more.txt").write_text("Another one, which nobody has read before now. " * 80)
    for seed in range(3):
        checkpoint(inputs / f"seed-{seed}", "gpt2", seed=seed)
    fine_tuned(small_model("gpt2")).save_pretrained(inputs / "tuned")
    run("random", inputs / "seed-0", "--out", inputs / "older")
    a, b, data = inputs / "seed-0", inputs / "seed-1", ("--data", inputs / "text.txt")
    line = ("--task", "clm", *data, "--points", 3, "--method", "none", "--samples", 4)
    run("barrier", a, b, *line, "--out", inputs / "line")
    _shorten()


def _shorten() -> None:
    """Workers of an experiment by fork (an import of torch takes seconds), a demo of one pair."""
    import multiprocessing

    import experiment_steps

    from symmerge.cli import demo
    from symmerge.lab.experiments import catalog, engines
    from symmerge.lab.training.recipes import DEMO, with_changes
    from symmerge.matching.recipes import RECIPES

    catalog.EXPERIMENTS = {**catalog.EXPERIMENTS, **experiment_steps.EXPERIMENTS}
    engines.get_context = lambda _: multiprocessing.get_context("fork")
    recipe = with_changes(DEMO["vit-digits"], schedule={"steps": 3}, config={})
    small = {"recipes": {"vit-digits": recipe}, "skills": {}, "points": 3}
    methods = {"methods": {"permutations": RECIPES["permutations"]}}
    demo.run_demo = partial(demo.run_demo, **small, **methods)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--quick", action="store_true", help="leave out those that take long")
    asked = parser.parse_args()
    place = Place(asked.folder.absolute())
    adopt_orphans()
    prepare(place)
    chosen = [verb for verb in verbs(place) if asked.only in ("", verb.label)]
    chosen = [verb for verb in chosen if not (asked.quick and verb.long)]
    if asked.table:
        print(f"{'verb':20}kills before during after identical")
    held = True
    for verb in chosen:
        outcome = kill_many(verb, place, asked.kills, seed=asked.seed, quick=asked.quick)
        held &= not outcome.problems
        print(_row(outcome) if asked.table else json.dumps(vars(outcome)), flush=True)
    return 0 if held else 1


def _row(outcome) -> str:
    moments = "".join(f"{outcome.moments[when]:7d}" for when in ("before", "during", "after"))
    first = "".join(f"\n    {problem}" for problem in outcome.problems[:3])
    return f"{outcome.label:20}{outcome.kills:5d}{moments}{outcome.identical:8d}{first}"


if __name__ == "__main__":
    sys.exit(main())
