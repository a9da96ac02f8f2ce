"""Options: two lengths of help, one name per idea, --config, stored precision, dry runs."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from fixtures import checkpoint, run
from safetensors.torch import load_file

import symmerge as sm
from symmerge.aligning.options import AlignOptions
from symmerge.cli import VERBS, command_for
from symmerge.cli.options.config import OTHERS
from symmerge.cli.options.help import MAIN
from symmerge.errors import MismatchError
from symmerge.matching.sweeps import Sweeps
from symmerge.matching.weights import WeightMatching
from symmerge.merging.pipeline import prepare_merge
from symmerge.merging.plan import MergePlan

FAST = ("--effort", "fast")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three GPT-2s, a Llama and a text; nobody changes them."""
    root = tmp_path_factory.mktemp("options")
    for seed in range(3):
        checkpoint(root / f"seed-{seed}", "gpt2", seed=seed)
    checkpoint(root / "llama", "llama")
    (root / "text.txt").write_text("One short text, read again and again. " * 40)
    return root


@pytest.fixture
def pair(place):
    return place / "seed-0", place / "seed-1"


def tensors(folder):
    return load_file(folder / "model.safetensors")


def is_further(option):
    return getattr(option, "rich_help_panel", None) is not None


def options_of(verb):
    params = command_for(verb).params
    shown = [one for one in params if not getattr(one, "hidden", False)]
    return [one for one in shown if one.param_type_name == "option"]


# help


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("symmerge.cli.console.out._width", None)


@pytest.mark.parametrize("verb", VERBS)
def test_the_main_help_is_short(narrow, verb):
    said = run(verb, "--help").stdout
    main = [option for option in options_of(verb) if not is_further(option)]
    assert len(main) + 1 <= 15  # with --help
    assert len(said.splitlines()) <= 60 and max(map(len, said.splitlines())) <= 80
    assert all(option.opts[-1] in said for option in main if option.name != "help_all")
    lines = said.partition("Examples:")[2].strip().splitlines()
    assert len(lines) == 3 and all(line.strip().startswith(f"symmerge {verb} ") for line in lines)


@pytest.mark.parametrize("verb", ["merge", "align", "train"])
def test_the_rest_is_in_panels(verb):
    said, everything = run(verb, "--help").stdout, run(verb, "--help-all").stdout
    further = [option for option in options_of(verb) if is_further(option)]
    assert further and f"{len(further)} more options" in said
    for option in further:
        # The long name: a word of its own, since --lr is part of no other.
        name = option.opts[0]
        assert f"{name} " in everything or f"{name}," in everything
        assert option.rich_help_panel in everything
        assert f"│ {name} " not in said and f"│ {name}," not in said
    assert MAIN in said


def test_help_all_is_not_offered_where_there_is_nothing_more():
    assert "--help-all" not in run("inspect", "--help").stdout
    assert "--help-all" in run("merge", "--help").stdout  # the control
    assert "--json" in run("inspect", "--help-all").stdout


def test_version():
    assert run("--version").stdout == f"symmerge {sm.__version__}\n"


def complete(words):
    """What the shell would offer for the last word."""
    environment = {
        **os.environ,
        "_SYMMERGE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    code = "import sys; sys.argv = ['symmerge']; from symmerge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    return done.stdout.split()


def test_the_shell_completes_verbs_and_options():
    assert complete(["symmerge", "mer"]) == ["merge"]
    offered = complete(["symmerge", "merge", "--ca"])
    assert {"--calibration", "--calibration-samples"} <= {*offered} and "--out" not in offered
    assert "--install-completion" in run("--help").stdout


# --config


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("dash", ["-", "_"])
def test_a_file_takes_every_option_by_its_name(tmp_path, verb, dash):
    """The last one is unknown: that alone is complained of."""
    names = [
        max(option.opts, key=len).lstrip("-").replace("-", dash)
        for option in options_of(verb)
        if option.name not in OTHERS
    ]
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({**dict.fromkeys(names), "no-such": 1}))
    said = run(verb, "--config", file, expect=2).stderr
    assert "unknown option no_such;" in " ".join(said.split())


def test_start_from_in_a_file(pair, tmp_path):
    """It arrives: what is wrong with its value is said."""
    for name in ("start-from", "start_from"):
        (tmp_path / "c.yaml").write_text(f"{name}: nowhere\nmethod: learned\n")
        said = run("align", *pair, "-o", tmp_path / "x", "--config", tmp_path / "c.yaml", expect=2)
        assert "--start-from nowhere: choose weights, activations or identity" in said.stderr


def test_models_from_a_file(pair, tmp_path):
    options = {"models": [str(one) for one in pair], "out": str(tmp_path / "out"), "effort": "fast"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options))
    run("merge", "--config", tmp_path / "c.yaml")
    run("merge", *pair, *FAST, "--out", tmp_path / "again")
    written, again = tensors(tmp_path / "out"), tensors(tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in written.items())


def test_a_file_of_mergekit_is_told_apart(pair, tmp_path):
    content = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    said = run("merge", *pair, "-o", tmp_path / "x", "--config", tmp_path / "c.yaml", expect=2)
    assert "names the models to merge: leave out" in said.stderr
    said = run("align", *pair, "-o", tmp_path / "x", "--config", tmp_path / "c.yaml", expect=2)
    assert "is a mergekit config: use symmerge merge --config" in said.stderr


# --dtype


@pytest.mark.parametrize("method", [("--method", "none"), FAST])
def test_an_unknown_precision_is_refused(pair, tmp_path, method):
    said = run("merge", *pair, "-o", tmp_path / "x", *method, "--dtype", "foo", expect=2).stderr
    assert said == "error: --dtype foo: choose float32, float16 or bfloat16\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("method", [("--method", "none"), FAST])
def test_the_stored_precision_is_what_was_asked_for(pair, tmp_path, method, name):
    run("merge", *pair, "-o", tmp_path / "plain", *method)
    run("merge", *pair, "-o", tmp_path / "out", *method, "--dtype", name)
    plain, stored = tensors(tmp_path / "plain"), tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in plain.values()} == {torch.float32}  # the control
    kind = getattr(torch, name)
    assert all(torch.equal(stored[key], tensor.to(kind)) for key, tensor in plain.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == name and "torch_dtype" not in config


def test_aligned_models_pass_the_gate_in_another_precision(pair, tmp_path):
    run("align", *pair, "-o", tmp_path / "out", *FAST, "--dtype", "bfloat16")
    for name in ("reference", "aligned"):
        stored = tensors(tmp_path / "out" / name)
        assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "out" / name / "symmerge.json").read_text())["verified"]
    run("verify", pair[1], tmp_path / "out" / "aligned")
    run("verify", pair[1], tmp_path / "out" / "reference", expect=1)  # the control


def test_python_converts_too(pair):
    merged = sm.merge(pair, method="fast", dtype="bfloat16")
    assert merged.dtype == torch.bfloat16 and sm.merge(pair, method="fast").dtype == torch.float32
    name = merged.weights.names()[0]
    assert merged.weights[name].dtype == torch.float32  # what is computed with
    with pytest.raises(MismatchError, match="--dtype int8"):
        sm.merge(pair, method="none", dtype="int8")


# one name per idea


def test_data_with_a_fast_effort_is_to_measure_on(place, pair, tmp_path):
    """The weights are those without data; what is measured on can be read from the options."""
    data = place / "text.txt"
    for out, more in (("without", ()), ("with", ("--data", data, "--samples", 4))):
        run("merge", *pair, "-o", tmp_path / out, *FAST, *more)
    without, given = tensors(tmp_path / "without"), tensors(tmp_path / "with")
    assert all(torch.equal(given[name], tensor) for name, tensor in without.items())
    options, models = AlignOptions(effort="fast", data=str(data), samples=4), [*map(sm.load, pair)]
    task = options.measured(models)
    assert task is not None and (task.samples, task.data) == (4, str(data))
    assert AlignOptions(effort="fast").measured(models) is None


def test_activations_look_at_calibration_or_else_at_data(place, pair):
    models, text = [*map(sm.load, pair)], str(place / "text.txt")
    looked_at = [
        AlignOptions(method="activations", **inputs).to_recipe(models).matching.data.samples
        for inputs in (
            {"data": text, "samples": 6},
            {"calibration": text, "calibration_samples": 4},
            {"data": text, "samples": 6, "calibration": text, "calibration_samples": 4},
        )
    ]
    assert looked_at == [6, 4, 4]


def test_learning_starts_from_calibration(place, pair):
    models, text = [*map(sm.load, pair)], str(place / "text.txt")
    options = {"method": "learned", "data": text, "samples": 6}
    recipe = AlignOptions(
        **options, start_from="activations", calibration=text, calibration_samples=4
    ).to_recipe(models)
    assert recipe.matching.data.samples == 6 and recipe.matching.start.data.samples == 4
    with pytest.raises(MismatchError, match="does not look at activations"):
        AlignOptions(**options, calibration=text).to_recipe(models)


def test_a_merge_hands_its_data_to_the_alignment(place, pair):
    """And calibration, unless only REPAIR looks at it."""
    text = str(place / "text.txt")
    plan = MergePlan(data=text, samples=4, repair="maps", calibration=text, calibration_samples=6)
    job = prepare_merge(pair, plan, AlignOptions(method="learned", steps=2))
    assert job.recipe and job.recipe.matching.data.samples == 4
    assert job.repair_task and job.repair_task.samples == 6
    job = prepare_merge(pair, plan, "fast")
    assert isinstance(job.recipe and job.recipe.matching, WeightMatching)
    with pytest.raises(MismatchError, match="does not look at activations"):
        prepare_merge(pair, MergePlan(calibration=text), "fast")


UNALIGNED = {
    "--steps 5": ("--steps", 5),
    "--effort best": ("--effort", "best"),
    "--solve-dtype float64": ("--solve-dtype", "float64"),
    "--permutations-only": ("--permutations-only",),
}


@pytest.mark.parametrize("words", UNALIGNED)
def test_what_says_how_to_align_is_refused_without_alignment(pair, tmp_path, words):
    said = run(
        "merge", *pair, "-o", tmp_path / "x", "--method", "none", *UNALIGNED[words], expect=2
    ).stderr
    assert said == f"error: --method none aligns nothing: leave out {words}\n"


# what merge and align share


@pytest.mark.parametrize("verb", ["merge", "align"])
def test_a_dry_run_says_what_it_would_take(place, pair, tmp_path, monkeypatch, verb):
    for step in ("symmerge.aligning.pair.solve_pair", "symmerge.aligning.many.match_universe"):
        monkeypatch.setattr(step, lambda *_, **__: pytest.fail("it began to work"))
    monkeypatch.setattr(
        "symmerge.aligning.options.make_inputs", lambda *_, **__: pytest.fail("it made inputs")
    )
    out = tmp_path / "out"
    for models in (pair, (*pair, place / "seed-2")):
        said = run(verb, *models, "-o", out, "--dry-run", "--method", "learned").stdout
        count = sm.load(pair[0]).parameters
        assert all(f"{one}: GPT2LMHeadModel, {count:,} parameters" in said for one in models)
        assert "GB of memory on cpu" in said and not list(tmp_path.iterdir())
    run(verb, *pair, "-o", out, "--dry-run", "--metric", "length", expect=2)
    run(verb, pair[0], place / "llama", "-o", out, "--dry-run", expect=2)


def test_a_dry_run_of_a_plain_average(pair, tmp_path):
    said = run("merge", *pair, "-o", tmp_path / "x", "--dry-run", "--method", "none").stdout
    assert "no alignment" in said and not list(tmp_path.iterdir())


LONG = ("--recipe", "symmerge", "--tries", 3)


def interrupt_second_try(monkeypatch):
    """Ctrl-C in the second sweep, which is of the second try."""
    sweep, calls = Sweeps.sweep, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        sweep(self)

    monkeypatch.setattr(Sweeps, "sweep", interrupted)


def test_an_interrupted_merge_goes_on(pair, tmp_path, monkeypatch):
    out, left = tmp_path / "out", tmp_path / "out.partial.safetensors"
    run("merge", *pair, "-o", tmp_path / "straight", *LONG)
    with monkeypatch.context() as patch:
        interrupt_second_try(patch)
        run("merge", *pair, "-o", out, *LONG)  # with the best alignment so far
    assert left.exists() and not list(tmp_path.glob("straight.partial*"))
    run("merge", *pair, "-o", out, "--overwrite", "--recipe", "symmerge", "--tries", 2, "--resume",
        expect=2)  # fmt: skip
    run("merge", *pair, "-o", out, "--overwrite", *LONG, "--resume")
    assert not left.exists()
    resumed, straight = tensors(out), tensors(tmp_path / "straight")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_merge_prints_json(pair, tmp_path):
    record = json.loads(run("merge", *pair, "-o", tmp_path / "out", *FAST, "--json").stdout)
    verdict = record.pop("verdict")
    assert verdict == json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert record == json.loads((tmp_path / "out" / "symmerge.json").read_text())
    assert record["steps"][-1]["step"] == "merge"


def test_merge_hands_over_to_mergekit(place, pair, tmp_path):
    """The config names the aligned parents, the weights and the method of the same merge."""
    file, models = tmp_path / "mergekit.yaml", (*pair, place / "seed-2")
    how = ("--combine", "ties", "--density", 0.4, "--weights", "0.5,0.3,0.2", "--reference", 1)
    run("merge", *models, "-o", tmp_path / "out", *FAST, *how, "--mergekit", file)
    config = yaml.safe_load(file.read_text())
    parents = tmp_path / "out-aligned"
    names = [item["model"] for item in config["models"]]
    assert names == [str(parents / name) for name in ("aligned-0", "reference", "aligned-2")]
    assert config["merge_method"] == "ties" and config["base_model"] == names[0]
    parameters = [item.get("parameters") for item in config["models"]]
    assert parameters[1:] == [
        {"weight": 0.3, "density": 0.4},
        {"weight": 0.2, "density": 0.4},
    ]
    again = sm.combine([sm.load(name) for name in names], "ties", [0.5, 0.3, 0.2], density=0.4)
    merged = sm.load(tmp_path / "out")
    for name in merged.weights:
        assert torch.allclose(merged.weights[name], again.weights[name], atol=1e-6)
    assert "out_dtype" not in config
    more = ("--method", "none", "--dtype", "bfloat16", "--mergekit", file)
    run("merge", *pair, "-o", tmp_path / "plain", *more)
    config = yaml.safe_load(file.read_text())
    assert (config["dtype"], config["out_dtype"]) == ("float32", "bfloat16")
    assert [item["model"] for item in config["models"]] == [str(one) for one in pair]
    said = run("merge", *pair, "-o", tmp_path / "x", "--mergekit", file, "--at", "ff=0.3", expect=2)
    assert "mergekit cannot merge with --at" in said.stderr


# errors


@pytest.mark.parametrize("verb", ["merge", "align"])
def test_other_architectures_are_refused_in_a_short_line(place, pair, tmp_path, verb):
    said = run(verb, pair[0], place / "llama", "-o", tmp_path / "x", expect=2).stderr
    names = str(pair[0]), str(place / "llama"), "GPT2LMHeadModel", "LlamaForCausalLM"
    assert all(name in said for name in names) and said.count("\n") == 1
    assert len(said.replace(names[0], "").replace(names[1], "")) < 200


def test_a_model_is_no_folder_of_results(pair, tmp_path):
    said = run("report", pair[0], "--out", tmp_path / "page.html", expect=2).stderr
    assert "holds no results" in said and f"--out {pair[0]}" not in said
