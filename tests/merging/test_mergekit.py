"""Configs for mergekit: what they say, and that the real mergekit gives what `combine` gives.

The real one is found by SYMMERGE_MERGEKIT, the path of its `mergekit-yaml`, or on PATH; it needs
an environment of its own.
"""

import os
import shutil
import subprocess

import pytest
import torch
import yaml
from fixtures import checkpoint

import symmerge as sm
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.lab.small_models import small_model
from symmerge.merging.combining import combine
from symmerge.merging.mergekit import OURS, mergekit_config

MERGEKIT = os.environ.get("SYMMERGE_MERGEKIT") or shutil.which("mergekit-yaml")
needs_mergekit = pytest.mark.skipif(
    not MERGEKIT, reason="mergekit is not here: set SYMMERGE_MERGEKIT to its mergekit-yaml"
)
WEIGHTS = [0.5, 0.3, 0.2]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folders(request, tmp_path_factory):
    """A reference and two models aligned to it; the tokenizers name fewer tokens than rows."""
    return aligned(tmp_path_factory.mktemp(request.param), request.param)


def aligned(home, name, **changes):
    first, *others = (
        sm.load(checkpoint(home / f"seed-{seed}", name, seed=seed, **changes)) for seed in range(3)
    )
    found = [sm.align(first, other, sm.WeightMatching(generate_text=False)) for other in others]
    models = [found[0].reference, *(one.aligned for one in found)]
    return [
        sm.save(model, home / folder)
        for model, folder in zip(models, ("reference", "aligned-1", "aligned-2"), strict=True)
    ]


def run_mergekit(text, home):
    (home / "recipe.yaml").write_text(text, "utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [MERGEKIT, "recipe.yaml", "merged", "--random-seed", "0"],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return sm.load(home / "merged")


def largest_difference(a, b):
    assert set(a.weights) == set(b.weights)
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


# the real mergekit


@needs_mergekit
@pytest.mark.parametrize(
    ("method", "count", "density", "base"),
    [
        ("linear", 2, 1.0, None),
        ("linear", 3, 1.0, None),
        ("slerp", 2, 1.0, None),
        ("ties", 3, 1.0, None),
        ("ties", 3, 0.4, None),
        ("ties", 2, 0.4, 2),
        ("dare_linear", 3, 1.0, None),
        ("dare_ties", 3, 1.0, None),
    ],
)
def test_mergekit_makes_what_we_make(folders, tmp_path, method, count, density, base):
    weights = WEIGHTS if count == 3 else [0.7, 0.3]
    home = folders[base] if base else None
    made = run_mergekit(
        mergekit_config(folders[:count], weights, method, base=home, density=density), tmp_path
    )
    models = [sm.load(folder) for folder in folders]
    ours = combine(
        models[:count], OURS[method], weights, base=models[base] if base else None, density=density
    )
    assert largest_difference(made, ours) <= 1e-6
    read = sm.merge(sm.read_mergekit(tmp_path / "recipe.yaml"), method="none")
    assert largest_difference(made, read) <= 1e-6
    assert largest_difference(made, combine(models[:count], "mean")) > 1e-2  # the control
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (
        folders[0] / "tokenizer.json"
    ).read_bytes()


@needs_mergekit
def test_dare_differs_only_by_chance_and_by_how_it_grows(folders, tmp_path):
    """mergekit rescales by the sum of magnitudes; we, as the paper, by 1/density: close."""
    made = run_mergekit(
        mergekit_config(folders[:2], [0.5, 0.5], "dare_linear", density=0.4), tmp_path
    )
    a, b = (sm.load(folder) for folder in folders[:2])
    ours = combine([a, b], "dare", density=0.4)
    name = next(name for name in a.weights if a.weights.shape(name) in ((48, 96), (96, 48)))
    difference = b.weights[name] - a.weights[name]
    growths = {}
    for side, found in (("theirs", made), ("ours", ours)):
        moved = found.weights[name] - a.weights[name]
        kept = moved != 0
        assert kept.double().mean().item() == pytest.approx(0.4, abs=0.04)
        growths[side] = (moved[kept] / difference[kept])[difference[kept].abs() > 0.05]
        assert growths[side].std() < 1e-3  # one factor for the whole tensor
    assert growths["ours"].mean().item() == pytest.approx(0.5 / 0.4, rel=1e-4)
    assert growths["theirs"].mean().item() == pytest.approx(0.5 / 0.4, rel=0.05)


@needs_mergekit
def test_a_tokenizer_source_would_cut_the_embeddings(folders, tmp_path):
    """Why the recipe names none."""
    text = mergekit_config(folders[:2])
    rows = {
        sm.load(folders[0]).weights.shape(name)[0]
        for name in sm.load(folders[0]).weights
        if name.endswith(("wte.weight", "embed_tokens.weight"))
    }
    cut = run_mergekit(text + "tokenizer_source: base\n", tmp_path)
    assert rows == {101} and {
        cut.weights.shape(name)[0]
        for name in cut.weights
        if name.endswith(("wte.weight", "embed_tokens.weight"))
    } == {71}


@needs_mergekit
def test_odd_paths_and_half_precision_go_through(tmp_path):
    home = tmp_path / 'it\'s "a" + b@c: #\\ é'
    home.mkdir()
    folders = aligned(home, "llama", dtype=torch.bfloat16)
    made = run_mergekit(mergekit_config(folders, WEIGHTS), tmp_path)
    ours = combine([sm.load(folder) for folder in folders], weights=WEIGHTS)
    assert made.dtype == torch.bfloat16
    stored = {name: ours.weights[name].bfloat16().float() for name in ours.weights}
    assert all(
        torch.allclose(made.weights[name], stored[name], rtol=2**-7, atol=1e-7) for name in stored
    )  # one step of rounding


# what a recipe says


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home = tmp_path_factory.mktemp("stored")
    for seed in range(3):
        small_model("gpt2", seed=seed).save_pretrained(home / f"m{seed}")
    return [home / f"m{seed}" for seed in range(3)]


def test_recipes_in_full(stored):
    a, b, c = map(str, stored)
    weight = [{"parameters": {"weight": w, "density": 0.5}} for w in WEIGHTS]
    models = [{"model": a}, {"model": b, **weight[1]}, {"model": c, **weight[2]}]
    whole = {"base_model": a, "dtype": "float32"}
    assert yaml.safe_load(mergekit_config([a, b], [0.75, 0.25])) == {
        "merge_method": "linear",
        "models": [
            {"model": a, "parameters": {"weight": 0.75}},
            {"model": b, "parameters": {"weight": 0.25}},
        ],
        **whole,
    }
    assert yaml.safe_load(mergekit_config([a, b], [0.75, 0.25], "slerp")) == {
        "merge_method": "slerp",
        "models": [{"model": a}, {"model": b}],
        "parameters": {"t": 0.25},
        **whole,
    }
    assert yaml.safe_load(mergekit_config(stored, WEIGHTS, "ties")) == {
        "merge_method": "ties",
        "models": models,
        "parameters": {"normalize": True},
        **whole,
    }
    dare = yaml.safe_load(mergekit_config(stored, WEIGHTS, "dare_ties"))
    assert dare == {
        "merge_method": "dare_ties",
        "models": models,
        "parameters": {"normalize": True, "rescale": True},
        **whole,
    }
    other = yaml.safe_load(mergekit_config([a, b], method="ties", base=c, density=0.25))
    assert (
        other["base_model"] == c
        and [one["parameters"] for one in other["models"]] == [{"weight": 0.5, "density": 0.25}] * 2
    )


def test_numbers_and_paths_survive_yaml(stored, tmp_path, monkeypatch):
    small = yaml.safe_load(mergekit_config(stored[:2], [1 - 1e-7, 1e-7]))["models"][1][
        "parameters"
    ]["weight"]
    assert small == 1e-7 and isinstance(
        yaml.safe_load("1e-07"), str
    )  # the control: why exponents are written out
    odd = tmp_path / "tab\t 'x' \"y\" \\ # : \u2028 \u00e9 \U0001f600"
    shutil.copytree(stored[0], odd)
    assert yaml.safe_load(mergekit_config([odd, stored[1]]))["base_model"] == str(odd)
    for sign in "+@":
        split = tmp_path / f"a{sign}b"
        shutil.copytree(stored[0], split)
        assert yaml.safe_load(mergekit_config([split, stored[1]]))["base_model"] == {
            "model": {"path": str(split)}
        }
    monkeypatch.chdir(stored[0].parent)
    assert yaml.safe_load(mergekit_config(["m0", "m1"]))["base_model"] == str(
        stored[0]
    )  # a relative path might be looked for on the hub


def test_what_mergekit_cannot_do_is_refused(stored, tmp_path):
    with pytest.raises(
        MismatchError,
        match="method breadcrumbs: those of mergekit that can be handed over are linear, slerp",
    ):
        mergekit_config(stored, method="breadcrumbs")
    with pytest.raises(MismatchError, match="slerp takes 2"):
        mergekit_config(stored, method="slerp")
    with pytest.raises(MismatchError, match="does not use differences from a base"):
        mergekit_config(stored, base=stored[0])
    with pytest.raises(MismatchError, match="density 2"):
        mergekit_config(stored, method="ties", density=2.0)
    with pytest.raises(MismatchError, match="given twice"):
        mergekit_config([stored[0], stored[0]])
    with pytest.raises(MismatchError, match="1 models: "):
        mergekit_config(stored[:1])
    small_model("gpt2", n_inner=64).save_pretrained(tmp_path / "narrow")
    with pytest.raises(MismatchError, match="they differ in"):
        mergekit_config([stored[0], tmp_path / "narrow"])
    with pytest.warns(SymmergeWarning, match="sum to 4"):
        assert "weight: 0.75" in mergekit_config(stored[:2], [3.0, 1.0])
    a, b = (sm.load(folder) for folder in stored[:2])
    sm.save(sm.average(a, b, attention="circuits"), tmp_path / "inflated")
    with pytest.raises(MismatchError, match="heads of twice the size"):
        mergekit_config([tmp_path / "inflated", stored[0]])
