"""Efforts: what each does for each kind of model, what it says first, and that it helps."""

import json
import pickle

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.aligning.options import AlignOptions
from symmerge.checkpoints import memory
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.lab.small_models import small_model
from symmerge.matching.efforts import AMOUNTS, EFFORTS, effort_recipe, learning_rate
from symmerge.matching.forecasts import Forecast, forecast
from symmerge.matching.learned import LearnedMatching
from symmerge.models.progress import Counted


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two GPT-2 in folders."""
    root = tmp_path_factory.mktemp("efforts")
    return [checkpoint(root / f"{seed}", "gpt2", seed=seed) for seed in (0, 1)]


def recipe_of(name, effort, **options):
    return AlignOptions(effort=effort, **options).to_recipe([sm.load(small_model(name))])


# what is chosen


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_all_but_the_fast_effort_learn(name):
    assert recipe_of(name, "fast").method == "weights"
    for effort in ("standard", "best"):
        solver = recipe_of(name, effort).matching
        assert isinstance(solver, LearnedMatching)
        assert solver.start.method == "weights" and solver.start.tries == 1
    assert solver.steps == max(each.steps for each in AMOUNTS["best", "cpu"].values())


def test_a_model_without_a_head_has_nothing_to_learn_from():
    assert recipe_of("dinov3", "standard").method == "weights"


def test_a_classifier_of_texts_learns_only_from_data():
    assert recipe_of("bert-classifier", "standard").method == "weights"
    model = sm.load(small_model("bert-classifier"))
    assert effort_recipe("standard", model, given=True).method == "learned"


@pytest.mark.real_effort
def test_the_usual_effort_is_standard(pair):
    assert AlignOptions().to_recipe([sm.load(pair[0])]).about.startswith("standard effort")


def test_options_change_an_effort():
    solver = recipe_of("gpt2", "standard", steps=7, lr=1e-4, tries=3, seed=5).matching
    assert (solver.steps, solver.lr, solver.seed) == (7, 1e-4, 5)
    assert (solver.start.tries, solver.start.seed) == (3, 5)


def test_wide_models_learn_slower():
    rates = [
        learning_rate(sm.load(small_model("gpt2", n_embd=width)), "clm") for width in (48, 768)
    ]
    assert rates == [pytest.approx(1e-2), pytest.approx(1e-2 / 3)]


REFUSED = {
    "an unknown effort": (("--effort", "most"), "--effort most: choose fast, standard or best"),
    "effort and method": (
        ("--effort", "fast", "--method", "learned"),
        "--effort fast chooses method and recipe: leave it out",
    ),
    "effort and recipe": (
        ("--effort", "best", "--recipe", "permutations"),
        "--effort best chooses method and recipe: leave it out",
    ),
    "steps of a fast effort": (
        ("--effort", "fast", "--steps", 5),
        "weights learns nothing",
    ),
    "data that is not there": (("--effort", "fast", "--data", "x.txt"), "x.txt does not exist"),
    "samples of a fast effort": (("--effort", "fast", "--samples", 4), "add --data"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(pair, tmp_path, options, said):
    result = run("align", *pair, "--out", tmp_path / "out", *options, expect=2)
    assert said in " ".join(result.output.split()) and not (tmp_path / "out").exists()


# what it does


def test_standard_learns_from_nothing_but_the_models(pair, tmp_path):
    out = tmp_path / "out"
    run("align", *pair, "--effort", "standard", "--steps", 12, "--out", out)
    record = json.loads((out / "solution.json").read_text())
    assert record["settings"]["data"] == "self" and record["recipe"].startswith("standard effort")
    assert min(record["objective"]) < record["objective"][0]
    for source, written in zip(pair, ("reference", "aligned"), strict=True):
        assert sm.verify(sm.load(source), sm.load(out / written)).same
    swapped = sm.verify(sm.load(pair[1]), sm.load(out / "reference"))
    assert not swapped.same  # the control


def test_efforts_are_lines_of_barrier(pair, tmp_path):
    options = ("--task", "clm", "--data", "self", "--samples", 4, "--points", 3, "--steps", 2)
    run("barrier", *pair, "--method", "none,fast,standard", *options, "--out", tmp_path / "curve")
    record = json.loads((tmp_path / "curve" / "curve.json").read_text())
    assert [line["name"] for line in record["methods"]] == ["none", "fast", "standard"]
    # Learned from other text than is measured on
    assert record["methods"][2]["settings"]["seed"] == 1


def test_without_memory_the_usual_effort_is_fast(monkeypatch):
    monkeypatch.setattr("symmerge.matching.efforts.USUAL", "standard")
    models = [sm.load(small_model("gpt2"))]
    assert AlignOptions().to_recipe(models).method == "learned"  # the control
    monkeypatch.setattr("symmerge.aligning.options.free_memory", lambda device: 10**8)
    with pytest.warns(SymmergeWarning, match="only weights are matched"):
        assert AlignOptions().to_recipe(models).method == "weights"
    with pytest.raises(MismatchError, match="choose --effort fast"):
        AlignOptions(effort="standard").to_recipe(models)


# what it says first


def test_the_first_line_is_an_estimate(pair):
    lines = []
    sm.align(*pair, "fast", progress=lines.append)
    assert lines[0].startswith("fast effort: weights alone: about ")
    assert lines[0].endswith("GB of memory on cpu")


def test_more_work_takes_longer(monkeypatch):
    monkeypatch.setattr("symmerge.matching.forecasts.products_per_second", lambda device: 1e11)
    model = sm.load(small_model("gpt2"))
    few, many = (
        forecast(LearnedMatching(steps=steps, generated=64), model) for steps in (1000, 3000)
    )
    assert few.seconds < many.seconds < 3 * few.seconds
    wide = sm.load(small_model("gpt2", n_embd=96))
    assert forecast(LearnedMatching(), wide).bytes > forecast(LearnedMatching(), model).bytes
    assert str(Forecast(400.0, 24_000_000_000)) == "about 7 min and 24 GB of memory"


# lines of progress


def test_counted_lines_travel_between_processes():
    line = pickle.loads(pickle.dumps(Counted("step 1 of 4", 1, 4)))
    assert (line, line.done, line.total) == ("step 1 of 4", 1, 4)


FULL = {
    "Python": MemoryError(),
    "a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "torch": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_memory_is_one_line_with_a_remedy(pair, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("symmerge.matching.sweeps.Sweeps.sweep", fail)
    out = tmp_path / "out"
    result = run("align", *pair, "--effort", "fast", "--out", out, expect=2)
    said = " ".join(result.output.split())
    assert "out of memory" in said and "--batch-size" in said and "--resume" in said
    assert "report" not in said and not out.exists()


def test_other_errors_are_not_taken_for_a_full_memory(pair, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr("symmerge.matching.sweeps.Sweeps.sweep", fail)
    result = run("align", *pair, "--effort", "fast", "--out", tmp_path / "out", expect=2)
    assert "out of memory" not in result.output and "please report it" in result.output


def test_learning_keeps_freed_memory_and_streaming_gives_it_back(monkeypatch):
    seen = []
    monkeypatch.setattr(memory, "_set_threshold", seen.append)
    monkeypatch.setattr(memory, "_returned", False)
    with memory.freed_memory_kept():
        pass
    assert seen == [memory.LARGEST_THRESHOLD]  # nobody had asked for anything else
    memory.return_freed_memory()
    with memory.freed_memory_kept():
        pass
    assert seen[1:] == [memory.LARGE_TENSOR, memory.LARGEST_THRESHOLD, memory.LARGE_TENSOR]


def test_unknown_efforts_are_refused_in_python():
    with pytest.raises(MismatchError, match="choose one of"):
        sm.align(small_model("gpt2"), small_model("gpt2"), "slowest")
    assert set(EFFORTS) == {"fast", "standard", "best"}
