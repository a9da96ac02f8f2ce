"""Does `merge --config` give the tensors of the real mergekit? Prints the largest differences.

    python experiments/mergekit_equality.py --mergekit PATH/mergekit-yaml [A B C]

mergekit needs an environment of its own. Three models are aligned and written; mergekit merges what
was written, we merge the same files as they are ("as written") and the original models ("aligned
here"). Without models, small ones are made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

import symmerge as sm
from symmerge.aligning.aligned import write_aligned
from symmerge.aligning.many import write_aligned_many
from symmerge.lab.small_models import small_model

METHOD = "permutations"  # how models are aligned: fast, and the same in every run
WEIGHTS = (0.6, 0.3, 0.4)  # no sum of one: what normalize does is seen


def entries(models: list[str], **parameters: object) -> list[dict[str, object]]:
    """Models with weights and other parameters."""
    return [
        {"model": model, "parameters": {"weight": weight, **parameters}}
        for model, weight in zip(models, WEIGHTS, strict=False)
    ]


def configs(models: list[str]) -> dict[str, dict[str, object]]:
    """mergekit configs over these models, by name; the first is the base."""
    base = {"base_model": models[0], "dtype": "float32"}
    by_layer = [{"filter": "attn", "value": [0, 0.5, 1]}, {"value": 0.3}]
    plain = [{"model": model} for model in models[:2]]

    def named(method: str, listed: list[dict[str, object]], **parameters: object) -> dict:
        return {**base, "merge_method": method, "models": listed, "parameters": parameters}

    three = entries(models)
    return {
        "linear": named("linear", three),
        "linear, not normalized": named("linear", three, normalize=False),
        "slerp": named("slerp", plain, t=0.3),
        "slerp, by layer and name": named("slerp", plain, t=by_layer),
        "ties of three, density 1": named("ties", three),
        "ties of three, density 0.4": named("ties", entries(models, density=0.4)),
        "ties, rescaled, lambda 0.7": named(
            "ties", entries(models, density=0.4), **{"rescale": True, "lambda": 0.7}
        ),
        "ties, not normalized": named("ties", entries(models, density=0.6), normalize=False),
        "task arithmetic": named("task_arithmetic", three),
        "dare_linear, density 1": named("dare_linear", entries(models, density=1.0)),
        "dare_ties, density 1": named("dare_ties", entries(models, density=1.0)),
    }


def run_mergekit(program: str, config: Mapping[str, object], home: Path) -> sm.Model:
    """What mergekit makes of a config."""
    out = home / "theirs"
    shutil.rmtree(out, ignore_errors=True)
    (home / "theirs.yml").write_text(yaml.safe_dump(dict(config)), "utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [program, "theirs.yml", "theirs", "--random-seed", "0"]
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return sm.load(out)


def ours(config: Mapping[str, object], home: Path, method: str) -> sm.Model:
    """What we make of a config."""
    (home / "ours.yml").write_text(yaml.safe_dump(dict(config)), "utf-8")
    return sm.merge(sm.read_mergekit(home / "ours.yml"), method=method)


def difference(a: sm.Model, b: sm.Model) -> float:
    """Largest difference of an entry."""
    assert set(a.weights) == set(b.weights)
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


def write(models: list[str], home: Path) -> dict[int, list[str]]:
    """Folders of the aligned models: of the first two, and of all."""
    write_aligned(sm.align(models[0], models[1], METHOD), home / "pair")
    write_aligned_many(sm.align_many(models, METHOD), home / "many")
    pair = [home / "pair" / name for name in ("reference", "aligned")]
    many = [home / "many" / name for name in ("reference", "aligned-1", "aligned-2")]
    return {2: [str(path) for path in pair], 3: [str(path) for path in many]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--mergekit", default=shutil.which("mergekit-yaml"))
    parser.add_argument("--family", default="llama")
    options = parser.parse_args()
    if not options.mergekit:
        raise SystemExit("mergekit is not here: --mergekit PATH/mergekit-yaml")
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        models = list(options.models)
        for seed in range(0 if models else 3):
            small_model(options.family, seed=seed).save_pretrained(home / f"seed-{seed}")
            models.append(str(home / f"seed-{seed}"))
        written = write(models, home)
        mean = sm.mean([sm.load(folder) for folder in written[3]])
        print("config\tas written\taligned here\tcontrol: plain mean")
        for name, config in configs(models).items():
            count = len(config["models"])  # type: ignore[arg-type]
            theirs = configs(written[count] + [written[3][2]] * (count == 2))[name]
            made = run_mergekit(options.mergekit, theirs, home)
            figures = (
                difference(made, ours(theirs, home, "none")),
                difference(made, ours(config, home, METHOD)),
                difference(made, mean),
            )
            print(f"{name}\t" + "\t".join(f"{figure:.1e}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
