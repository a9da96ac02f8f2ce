"""What the command line can do, Python can do: names of methods, folders, widening, merging."""

import subprocess
import sys

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.errors import MismatchError, SymmergeWarning, SymmetryError

FAST = sm.AlignOptions(recipe="weights-only", tries=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("front")
    return [checkpoint(root / f"seed-{seed}", "gpt2", seed=seed) for seed in range(3)]


def equal(a, b):
    return all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_every_public_name_is_there():
    assert all(getattr(sm, name) is not None for name in sm.__all__)
    assert {*sm.__all__} <= {*dir(sm)}
    with pytest.raises(AttributeError, match="no attribute 'merg'"):
        sm.merg  # noqa: B018


def test_importing_symmerge_waits_for_no_torch():
    look = "print('torch' in sys.modules)"
    code = f"import sys, symmerge; {look}; symmerge.load; {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_models_by_folder_and_recipes_by_name(folders):
    by_name = sm.align(*folders[:2], "permutations")
    by_recipe = sm.align(*map(sm.load, folders[:2]), sm.recipes["permutations"])
    assert equal(by_name.aligned, by_recipe.aligned)
    assert len(repr(by_name).splitlines()) <= 3 and "seed-1 to" in repr(by_name)
    with pytest.raises(MismatchError, match="no recipe called 'magic'"):
        sm.align(*folders[:2], "magic")
    with pytest.raises(MismatchError, match="activations need something to look at"):
        sm.align(*folders[:2], "activations")
    with pytest.raises(SymmetryError, match="soft is not a symmetry"):
        sm.align(*folders[:2], "soft")


def test_a_narrow_model_is_widened(folders, tmp_path):
    narrow = checkpoint(tmp_path / "narrow", "gpt2", seed=5, n_embd=32, n_inner=64)
    with pytest.warns(SymmergeWarning, match="narrower"):
        result = sm.align(folders[0], narrow, FAST)
    assert result.aligned.config["n_embd"] == 48 and sm.verify(sm.load(narrow), result.aligned).same


def test_merge_aligns_first_as_the_command_does(folders, tmp_path):
    run("merge", *folders[:2], "--recipe", "weights-only", "--tries", 1, "--out", tmp_path / "out")
    merged = sm.merge(folders[:2], method=FAST)
    assert equal(merged, sm.load(tmp_path / "out"))
    assert equal(merged, sm.merge(sm.align(*folders[:2], FAST)))
    plain = sm.merge(folders[:2], method="none")
    assert not equal(merged, plain)  # the control: a plain average is another model
    assert equal(plain, sm.average(*map(sm.load, folders[:2])))


def test_merge_of_many_takes_weights_and_ways_to_combine(folders):
    result = sm.align_many(folders, FAST)
    assert len(repr(result).splitlines()) <= 3
    weights = [0.5, 0.3, 0.2]
    assert equal(
        sm.merge(folders, method=FAST, weights=weights, combine="ties"),
        sm.combine(result.models, "ties", weights),
    )
    assert equal(sm.merge(result, weights=weights), sm.mean(result.models, weights))
    for options, words in (
        ({"t": 0.3}, "give --weights"),
        ({"combine": "soup"}, "give --data"),
        ({"reference": 3}, "a number from 0 to 2"),
        ({"repair": "maps"}, "give --calibration"),
    ):
        with pytest.raises(MismatchError, match=words):
            sm.merge(folders, method=FAST, **options)
