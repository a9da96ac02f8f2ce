"""mergekit's configs read: its formulas by hand, alignment before, and what cannot be done.

The real mergekit is compared by experiments/mergekit_equality.py, and by test_mergekit.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.merging.mergekit import OURS, mergekit_config
from symmerge.merging.mergekit_methods import tensor_depth

WEIGHTS = [0.6, 0.3, 0.4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three models that are taken as they are: the formulas do not ask whether they fit."""
    home = tmp_path_factory.mktemp("models")
    return [checkpoint(home / f"seed-{seed}", "llama", seed=seed) for seed in range(3)]


@pytest.fixture
def config(tmp_path):
    """Write a config and read it again."""

    def write(method, models, parameters=None, **more):
        content = {"merge_method": method, "models": models, "parameters": parameters or {}, **more}
        file = tmp_path / "merge.yml"
        file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value}))
        return file

    return write


def weighed(folders, **parameters):
    return [
        {"model": str(folder), "parameters": {"weight": weight, **parameters}}
        for folder, weight in zip(folders, WEIGHTS, strict=True)
    ]


def arrays(models, name):
    return [model.weights[name].double().numpy() for model in models]


def merged(file, **options):
    return sm.merge(sm.read_mergekit(file), method="none", **options)


def check(found, models, formula):
    """Every tensor is what a formula in numpy gives; the control is another formula."""
    for name in found.weights:
        expected = formula(name, *arrays(models, name))
        np.testing.assert_allclose(found.weights[name].numpy(), expected, rtol=0, atol=1e-6)
    mean = [np.mean(arrays(models, name), 0) for name in found.weights]
    pairs = zip(found.weights, mean, strict=True)
    assert max(np.abs(found.weights[name].numpy() - one).max() for name, one in pairs) > 1e-2


def trimmed(difference, density):
    """The largest entries, by sorting."""
    count = max(1, int(density * difference.size))
    least = np.sort(np.abs(difference).ravel())[-count]
    return np.where(np.abs(difference) >= least, difference, 0)


def elected(weights, differences, *, normalize=True):
    votes = np.stack([weight * one for weight, one in zip(weights, differences, strict=True)])
    agrees = np.sign(votes) == np.where(votes.sum(0) >= 0, 1, -1)
    total = (votes * agrees).sum(0)
    counted = np.einsum("m,m...->...", np.array(weights), agrees)
    return total / np.where(counted == 0, 1, counted) if normalize else total


# formulas


def test_linear(folders, config):
    models = [sm.load(folder) for folder in folders]
    file = config("linear", weighed(folders))
    check(merged(file), models, lambda _, a, b, c: (0.6 * a + 0.3 * b + 0.4 * c) / sum(WEIGHTS))
    file = config("linear", weighed(folders), {"normalize": False})
    check(merged(file), models, lambda _, a, b, c: 0.6 * a + 0.3 * b + 0.4 * c)


def arc(a, b, t):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    cosine = (a * b).sum() / size if size else 0.0
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def test_slerp_starts_at_the_base(folders, config):
    listed = [{"model": str(folder)} for folder in folders[:2]]
    a, b = (sm.load(folder) for folder in folders[:2])
    file = config("slerp", listed, {"t": 0.3}, base_model=str(folders[0]))
    check(merged(file), [a, b], lambda _, x, y: arc(x, y, 0.3))
    file = config("slerp", listed, {"t": 0.3}, base_model=str(folders[1]))
    check(merged(file), [b, a], lambda _, x, y: arc(x, y, 0.3))
    assert sm.read_mergekit(file).models == (str(folders[1]), str(folders[0]))


def test_values_by_layer_and_by_name(folders, config):
    """Straight lines between the values; what lies outside of the layers has the first one."""
    listed = [{"model": str(folder)} for folder in folders[:2]]
    rules = [{"filter": "self_attn", "value": [0.2, 0.8]}, {"filter": "mlp", "value": 0.1}]
    t = [*rules, {"value": [0.5, 0.9]}]
    file = config("slerp", listed, {"t": t}, base_model=str(folders[0]))

    def expected(name, x, y):
        last = ".1." in name
        if "self_attn" in name:
            return arc(x, y, 0.8 if last else 0.2)
        return arc(x, y, 0.1 if "mlp" in name else 0.9 if last else 0.5)

    check(merged(file), [sm.load(folder) for folder in folders[:2]], expected)
    assert [tensor_depth(f"model.layers.{n}.x", 5) for n in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert tensor_depth("lm_head.weight", 5) == 0 and tensor_depth("model.layers.0.x", 1) == 1


@pytest.mark.parametrize("normalize", [True, False])
def test_ties(folders, config, normalize):
    parameters = {"normalize": normalize, "lambda": 0.7, "int8_mask": True}
    file = config("ties", weighed(folders, density=0.4), parameters, base_model=str(folders[0]))

    def expected(_, base, *others):
        kept = [trimmed(one - base, 0.4) for one in others]
        return base + 0.7 * elected(WEIGHTS[1:], kept, normalize=normalize)

    check(merged(file), [sm.load(folder) for folder in folders], expected)


def test_ties_rescaled_and_a_density_per_model(folders, config):
    models = weighed(folders)
    models[1]["parameters"]["density"] = 0.2
    file = config("ties", models, {"rescale": True, "density": 0.8}, base_model=str(folders[0]))

    def expected(_, base, *others):
        kept = [trimmed(one - base, share) for one, share in zip(others, (0.2, 0.8), strict=True)]
        grown = [
            one * np.abs(other - base).sum() / max(np.abs(one).sum(), 1e-30)
            for one, other in zip(kept, others, strict=True)
        ]
        return base + elected(WEIGHTS[1:], grown)

    check(merged(file), [sm.load(folder) for folder in folders], expected)


def test_of_equal_differences_as_many_are_kept_as_the_density_says(folders, config):
    """Half precision makes many of them; a threshold would keep all."""
    a, b = (sm.load(folder) for folder in folders[:2])
    weights = {name: a.weights[name] + 1 for name in a.weights}
    other = replace(b, weights=MemoryWeights(weights))
    file = config("ties", weighed(folders)[:2], {"density": 0.3}, base_model=str(folders[0]))
    found = sm.read_mergekit(file).combined([a, other])
    for name in a.weights:
        moved = found.weights[name] - a.weights[name]
        assert (moved.abs() > 0.5).sum() == max(1, int(0.3 * moved.numel()))
        assert moved.abs().max() <= 1 + 1e-6


def test_task_arithmetic_and_a_base_that_is_not_listed(folders, config):
    models = [sm.load(folder) for folder in folders]
    listed = weighed(folders)[1:]
    file = config("task_arithmetic", listed, base_model=str(folders[0]))
    check(merged(file), models, lambda _, a, b, c: a + 0.3 * (b - a) + 0.4 * (c - a))
    file = config("task_arithmetic", listed, {"normalize": True}, base_model=str(folders[0]))
    check(merged(file), models, lambda _, a, b, c: a + (0.3 * (b - a) + 0.4 * (c - a)) / 0.7)


def test_dare_draws_by_seed(folders, config):
    models = [sm.load(folder) for folder in folders]
    base = str(folders[0])
    file = config("dare_linear", weighed(folders, density=1.0), base_model=base)
    check(merged(file), models, lambda _, a, b, c: a + 0.3 * (b - a) + 0.4 * (c - a))
    file = config("dare_ties", weighed(folders), base_model=base)
    expected = lambda _, a, b, c: a + elected([0.3, 0.4], [b - a, c - a], normalize=False)  # noqa: E731
    check(merged(file), models, expected)
    file = config("dare_linear", weighed(folders[:2] + folders[2:], density=0.5), base_model=base)
    first, again, other = merged(file), merged(file), merged(file, seed=1)
    name = next(name for name in first.weights if "mlp.up_proj" in name)
    assert torch.equal(first.weights[name], again.weights[name])
    assert not torch.equal(first.weights[name], other.weights[name])
    untouched = (first.weights[name] == models[0].weights[name]).double().mean().item()
    assert untouched == pytest.approx(0.25, abs=0.05)  # neither of two was kept


# from files to a merge


@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare_linear", "dare_ties"])
def test_what_we_write_is_read_as_what_combine_does(folders, tmp_path, method):
    given = folders[:2] if method == "slerp" else folders
    weights = [0.7, 0.3] if method == "slerp" else [0.5, 0.3, 0.2]
    density = 1.0 if "dare" in method else 0.4  # DARE draws differently, and scales by size
    text = mergekit_config(given, weights, method, density=density)
    (tmp_path / "written.yml").write_text(text)
    models = [sm.load(folder) for folder in given]
    expected = sm.combine(models, OURS[method], weights, density=density)
    found, other = merged(tmp_path / "written.yml"), sm.combine(models, OURS[method])
    largest = [
        max((found.weights[n] - one.weights[n]).abs().max().item() for n in found.weights)
        for one in (expected, other)
    ]
    assert largest[0] <= 1e-6 and largest[1] > 1e-3  # the control: other weights and density


def test_the_command_aligns_to_the_base_and_converts(folders, config, tmp_path):
    listed = [{"model": str(folder), "parameters": {"weight": 1}} for folder in folders[:2]]
    more = {"base_model": str(folders[1]), "dtype": "bfloat16"}
    file = config("linear", listed, **more)
    said = run("merge", "--config", file, "--recipe", "permutations", "--out", tmp_path / "merged")
    assert "linear of" in said.stdout and "parents compute what they did" in said.stdout
    found = sm.load(tmp_path / "merged")
    expected = sm.merge([folders[1], folders[0]], method="permutations")
    plain = sm.merge([folders[1], folders[0]], method="none")
    assert found.dtype == torch.bfloat16
    for name in found.weights:
        rounded = expected.weights[name].bfloat16().float()
        torch.testing.assert_close(found.weights[name], rounded, rtol=2**-7, atol=1e-6)
    apart = max((found.weights[n] - plain.weights[n]).abs().max().item() for n in found.weights)
    assert apart > 1e-2  # the control: without alignment


def test_whole_slices_are_models(folders, config, tmp_path):
    whole = [{"model": str(folder), "layer_range": [0, 2]} for folder in folders[:2]]
    content = {
        "merge_method": "slerp",
        "base_model": str(folders[0]),
        "slices": [{"sources": whole, "parameters": {"t": [{"filter": "mlp", "value": 0.2}]}}],
        "parameters": {"t": 0.6},
    }
    (tmp_path / "slices.yml").write_text(yaml.safe_dump(content))
    models = [sm.load(folder) for folder in folders[:2]]
    by_name = lambda name, x, y: arc(x, y, 0.2 if "mlp" in name else 0.6)  # noqa: E731
    check(merged(tmp_path / "slices.yml"), models, by_name)
    whole[1]["layer_range"] = [0, 1]
    (tmp_path / "slices.yml").write_text(yaml.safe_dump(content))
    with pytest.raises(MismatchError, match=r"layer_range \[0, 1\] is not supported: only whole"):
        sm.read_mergekit(tmp_path / "slices.yml")


A, B = ({"model": name, "parameters": {"weight": 1.0}} for name in "ab")
REFUSED = {
    "merge_method breadcrumbs is not supported: choose one of linear": {"method": "breadcrumbs"},
    "tokenizer_source is not supported: the merge keeps": {"tokenizer_source": "union"},
    "chat_template is not supported": {"chat_template": "auto"},
    "colour is not supported: symmerge does not know it": {"colour": "red"},
    r"parameters\.gamma is not supported: ties takes weight, density": {
        "method": "ties",
        "base_model": "a",
        "parameters": {"gamma": 1},
    },
    r"models\[1\]\.parameters\.normalize is not supported: it is of the merge": {
        "models": [A, {"model": "b", "parameters": {"weight": 1, "normalize": True}}]
    },
    r"models\[1\]\.scale is not supported": {"models": [A, {**B, "scale": 2}]},
    r"models\[1\]\.model b\+lora is not supported: \+ asks for an adapter": {
        "models": [A, {"model": "b+lora"}]
    },
    "@ asks for a revision": {"models": [A, {"model": "b@main"}]},
    "a model that is there twice is not supported": {"models": [A, {**B, "model": "./a"}]},
    "ties without base_model is not supported": {"method": "ties"},
    "slerp of 3 models is not supported: it takes 2": {
        "method": "slerp",
        "base_model": "a",
        "models": [{"model": name} for name in "abc"],
        "parameters": {"t": 0.5},
    },
    r"slerp without parameters\.t": {
        "method": "slerp",
        "base_model": "a",
        "models": [{"model": name} for name in "ab"],
    },
    "linear of b without a weight is not supported: give one": {"models": [A, {"model": "b"}]},
    "dtype float8 is not supported: weights are stored in float32": {"dtype": "float8"},
    "a merge of one model is not supported": {"models": [A]},
    r"parameters\.normalize is not supported: write true or false": {
        "parameters": {"normalize": 0.5}
    },
    r"parameters\.weight is not supported: 'heavy' is not a number": {
        "models": [A, {"model": "b", "parameters": {"weight": "heavy"}}]
    },
    r"parameters\.weight\[0\]\.when is not supported": {
        "models": [A, {"model": "b", "parameters": {"weight": [{"value": 1, "when": "x"}]}}]
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_done_is_named(config, words):
    options = {"method": "linear", "models": [A, B], **REFUSED[words]}
    file = config(options.pop("method"), options.pop("models"), **options)
    with pytest.raises(MismatchError, match=rf"merge\.yml: .*{words}") as raised:
        sm.read_mergekit(file)
    assert "\n" not in str(raised.value)
    assert sm.read_mergekit(config("linear", [A, B])).models == ("a", "b")  # the control


def test_other_files_and_options_beside_are_refused(folders, config, tmp_path):
    (tmp_path / "options.yml").write_text("seed: 1\n")
    with pytest.raises(MismatchError, match="is not a mergekit config: it has no merge_method"):
        sm.read_mergekit(tmp_path / "options.yml")
    (tmp_path / "bad.yml").write_text("merge_method: [*a\n")
    with pytest.raises(MismatchError, match=r"cannot be read as YAML|has an alias"):
        sm.read_mergekit(tmp_path / "bad.yml")
    file = config("linear", weighed(folders))
    with pytest.raises(MismatchError, match="already says how to merge: leave out --combine"):
        merged(file, combine="ties")
    out = ("--out", tmp_path / "x")
    assert "leave out" in run("merge", folders[0], "--config", file, *out, expect=2).stderr
    said = run("align", "--config", file, *out, expect=2).stderr
    assert "is a mergekit config: use symmerge merge --config" in said
    run("merge", *folders[:2], "--config", tmp_path / "options.yml", "--method", "none", *out)
