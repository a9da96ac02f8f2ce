"""The same bytes with one and two threads; what is learned agrees to rounding."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from fixtures import checkpoint, run
from safetensors.torch import load_file

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
from symmerge.checkpoints.writing import write_weights
from symmerge.lab.small_models import small_model
from symmerge.matching import sweeps
from symmerge.symmetry import threads
from symmerge.symmetry.threads import same_bytes, side_by_side

FAMILIES = ("bert", "gpt2", "llama")  # a stream that permutes, and two that rotate
WEIGHTS = ("--recipe", "weights-only", "--tries", 1)
MANY = 2


@pytest.fixture(autouse=True)
def number_of_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints of a family."""
    root = tmp_path_factory.mktemp("threads")
    (root / "text.txt").write_text("One short text, read again and again. " * 80)

    def made(name):
        for seed in (0, 1):
            if not (root / f"{name}-{seed}").exists():
                checkpoint(root / f"{name}-{seed}", name, seed=seed)
        return root / f"{name}-0", root / f"{name}-1"

    return made


def written(folder):
    """Every file of a folder; the seconds of solution.json left out."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    for path in [path for path in files if path.name == "solution.json"]:
        files[path] = {**json.loads(files[path]), "seconds": 0}
    return files


def aligned(models, count, out, *options):
    torch.set_num_threads(count)
    run("align", *models, "--out", out, *options)
    assert torch.get_num_threads() == count
    return written(out)


def both(models, tmp_path, *options):
    return [aligned(models, count, tmp_path / f"{count}", *options) for count in (1, MANY)]


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_matching_gives_the_same_bytes(name, pair, tmp_path):
    one, many = both(pair(name), tmp_path, *WEIGHTS)
    assert one == many


def test_the_comparison_sees_a_difference(pair, tmp_path):
    one = aligned(pair("gpt2"), 1, tmp_path / "one", *WEIGHTS)
    assert one != aligned(pair("gpt2"), 1, tmp_path / "other", "--recipe", "permutations")


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_activation_matching_gives_the_same_bytes(name, pair, tmp_path):
    models = pair(name)
    data = models[0].parent / "text.txt" if name == "gpt2" else "self"
    options = ("--method", "activations", "--data", data, "--samples", 16, "--tries", 2)
    one, many = both(models, tmp_path, *options)
    assert one == many


def test_large_products_in_tiles_give_the_same_bytes(pair, tmp_path, monkeypatch):
    """As in large models: every product is cut, and two workers compute the tiles."""
    monkeypatch.setattr(threads, "LARGE", 1)
    monkeypatch.setattr(threads, "ROWS", 16)
    one, many = both(pair("gpt2"), tmp_path, "--recipe", "symmerge", "--tries", 2)
    assert one == many


@pytest.mark.parametrize(
    ("a", "b"),
    [((40, 7), (7, 30)), ((7, 30), (30, 40)), ((3, 5, 7), (3, 7, 2)), ((3, 9, 7), (7, 4))],
)
def test_tiles_are_the_product(a, b, monkeypatch):
    monkeypatch.setattr(threads, "LARGE", 1)
    monkeypatch.setattr(threads, "ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (a, b))
    bias, results = torch.randn(b[-1], generator=generator, dtype=torch.float64), []
    with torch.no_grad(), threads.same_bytes():
        results += [x @ y, torch.matmul(x, y)]
        if len(b) == 3:
            results.append(torch.bmm(x, y))
        if len(b) == 2:
            results.append(torch.nn.functional.linear(x, y.T.contiguous(), bias) - bias)
            results.append(torch.addmm(bias, x.flatten(0, -2), y).view(*x.shape[:-1], -1) - bias)
    for result in results:
        torch.testing.assert_close(result, torch.einsum("...ij,...jk->...ik", x, y))


@pytest.mark.parametrize("count", [1, MANY])
def test_side_by_side_keeps_the_order_and_the_limit(count):
    torch.set_num_threads(count)
    asked = []

    def items():
        for number in range(20):
            asked.append(number)
            yield number

    with same_bytes():
        for number, (square, thread) in enumerate(side_by_side(squared, items(), 3)):
            assert square == number**2 and thread != threading.get_ident()
            assert len(asked) <= number + 4
        assert next(side_by_side(squared, [5], 1)) == (25, threading.get_ident())
    assert next(side_by_side(squared, [5], 3)) == (25, threading.get_ident())


def squared(number):
    assert torch.get_num_threads() == 1 or not threads._pool()
    return number**2, threading.get_ident()


def test_an_error_side_by_side_is_raised_and_ends_the_rest():
    begun = []

    def fails(number):
        begun.append(number)
        return 1 // (number - 2)

    with same_bytes(), pytest.raises(ZeroDivisionError):
        list(side_by_side(fails, range(100)))
    assert 3 <= len(begun) < 20


def test_gradients_pass_through(monkeypatch):
    monkeypatch.setattr(threads, "LARGE", 1)
    x = torch.ones(300, 3, requires_grad=True)
    with threads.same_bytes():
        (x @ torch.ones(3, 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((300, 3), 2.0))


def test_processes_with_other_environments_give_the_same_bytes(pair, tmp_path):
    """OpenMP and MKL take their numbers of threads from the environment."""
    found = []
    for count in ("1", "2"):
        line = [sys.executable, "-m", "symmerge", "align", *pair("vit"), *WEIGHTS, "--out"]
        environment = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        line = [*map(str, line), str(tmp_path / count)]
        subprocess.run(line, check=True, env=environment, capture_output=True, timeout=120)
        found.append(written(tmp_path / count))
    assert found[0] == found[1]


def test_learned_results_agree_to_rounding_and_say_the_threads(pair, tmp_path):
    models = pair("gpt2")
    data = ("--data", models[0].parent / "text.txt", "--samples", 16)
    start = ("--start-from", "weights", "--tries", 1)
    both(models, tmp_path, "--method", "learned", *data, *start, "--steps", 4)
    one, many = (load_file(tmp_path / f"{n}/aligned/model.safetensors") for n in (1, MANY))
    for name, tensor in one.items():
        assert (tensor - many[name]).norm() <= 1e-5 * tensor.norm(), name
    for count in (1, MANY):
        solution = json.loads((tmp_path / f"{count}" / "solution.json").read_text())
        assert solution["settings"]["learned"]["threads"] == count


def test_the_writers_threads_compute_with_as_many_threads_as_their_caller(tmp_path):
    """A new thread would take them from the environment, and give MKL that number for all."""
    torch.set_num_threads(MANY)
    seen = []

    def compute():
        seen.append(torch.get_num_threads())
        return torch.zeros(3)

    names = [f"tensor-{number}" for number in range(4)]
    weights = DerivedWeights(
        MemoryWeights({}),
        dict.fromkeys(names, compute),
        added=dict.fromkeys(names, ((3,), torch.float32)),
    )
    with same_bytes():
        write_weights(tmp_path, weights)
    assert seen == [1] * 4
    write_weights(tmp_path, weights)  # the control: elsewhere all threads may work
    assert seen[4:] == [MANY] * 4


def test_no_element_changes_while_a_wave_is_matched(monkeypatch):
    """Workers iterate over the elements: `dictionary changed size`, once in 2,000 fuzzed runs."""
    seen = []

    def one_after_the_other(function, items, most=None):
        sweeps = function.__self__
        for item in items:
            before = {*sweeps.elements}
            yield function(item)
            seen.append({*sweeps.elements} == before)

    monkeypatch.setattr(sweeps, "side_by_side", one_after_the_other)
    a, b = (sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1))
    sm.align(a, b, sm.WeightMatching(generate_text=False, max_sweeps=1))
    assert len(seen) > 4 and all(seen)
