"""The command line: what each verb prints, writes and answers."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import symmerge as sm
from symmerge.cli import VERBS, app, command_for
from symmerge.cli.options.matching import abbreviated
from symmerge.lab.small_models import SMALL, small_model
from symmerge.matching.recipes import BY_METHOD

HEAD, WTE = "lm_head.weight", "transformer.wte.weight"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Small checkpoints as save_pretrained writes them, each made once; nobody changes them."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def make(name, seed=0, **changes):
        folder = root / "-".join(
            [name, str(seed), *(f"{key}{value}" for key, value in changes.items())]
        )
        small_model(name, seed=seed, **changes).save_pretrained(folder)
        return folder

    return make


def run(*arguments, expect=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, (result.exit_code, result.output, result.exception)
    assert "\x1b" not in result.output  # no colours where nobody sees them
    return result


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# inspect


def test_inspect_json(saved):
    """Against formulas: a rotation that fixes the mean, general linear heads, permutations."""
    model = small_model("gpt2")
    found = json.loads(run("inspect", saved("gpt2"), "--json").stdout)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (found["architecture"], found["parameters"], found["bytes"]) == (
        "GPT2LMHeadModel",
        count,
        4 * count,
    )
    assert found["tied"] == {HEAD: WTE}
    width, heads, head_size, units, layers = 48, 4, 12, 96, 2
    assert (
        found["degrees of freedom"]
        == (width - 1) * (width - 2) // 2 + layers * heads * 2 * head_size**2
    )
    assert found["discrete (log10)"] == pytest.approx(
        layers * (math.lgamma(heads + 1) + math.lgamma(units + 1)) / math.log(10)
    )
    spaces = {row["space"]: row for row in found["spaces"]}
    assert (spaces["qk.{i}"]["group"], spaces["qk.{i}"]["size"], spaces["qk.{i}"]["elements"]) == (
        "GeneralLinear",
        head_size,
        layers * heads,
    )
    tensors = {row["tensor"]: row for row in found["tensors"]}
    assert (tensors[WTE]["shape"], tensors[WTE]["axes"], tensors[WTE]["dtype"]) == (
        "101x48",
        "vocabulary residual",
        "float32",
    )
    assert (
        sum(
            row["count"] * math.prod(int(n) for n in row["shape"].split("x"))
            for row in found["tensors"]
        )
        == count
    )


@pytest.mark.parametrize("name", SMALL)
def test_inspect_table(saved, name):
    """Plain lines in a pipe: as many columns as in the heading, the numbers of --json."""
    found = json.loads(run("inspect", saved(name), "--json").stdout)
    lines = run("inspect", saved(name)).stdout.splitlines()
    assert (
        lines[0] == f"{SMALL[name][0]} ({found['family']}), {found['task']},"
        f" {found['parameters']:,} parameters"
    )
    assert lines[1].startswith(f"{found['degrees of freedom']:,} continuous degrees of freedom")
    start = lines.index("# Spaces")
    middle = next(at for at, line in enumerate(lines) if line.startswith("# Tensors"))
    for block, rows in (
        (lines[start + 1 : middle], found["spaces"]),
        (lines[middle + 1 :], found["tensors"]),
    ):
        assert block[0].split("\t") == list(rows[0]) and len(block) == len(rows) + 1
        assert [line.split("\t")[0] for line in block[1:]] == [
            next(iter(row.values())) for row in rows
        ]
        assert {line.count("\t") for line in block} == {len(rows[0]) - 1}


# random, apply, canonical, verify


def test_round_trip(saved, tmp_path):
    source, moved, again = saved("llama"), tmp_path / "moved", tmp_path / "again"
    result = run("random", source, "--out", moved, "--seed", 3)
    assert (
        f"wrote {moved} (verified: the same function)" in result.stdout
        and "fold: 5 gains" in result.stdout
    )
    assert run("verify", source, moved).stdout.startswith(
        "the same function: relative logit difference"
    )
    run("apply", moved / "alignment.safetensors", source, "-o", again)
    same = bytes_of(moved)["model.safetensors"] == bytes_of(again)["model.safetensors"]
    assert same and bytes_of(source)["model.safetensors"] != bytes_of(moved)["model.safetensors"]
    run("canonical", source, "--out", tmp_path / "canonical")
    run("verify", tmp_path / "canonical", moved)
    gains = [
        tensor
        for name, tensor in load_file(tmp_path / "canonical/model.safetensors").items()
        if "norm.weight" in name
    ]
    assert len(gains) == 5 and all((gain == 1).all() for gain in gains)


def test_verify_says_no(saved, tmp_path):
    """Other weights of the same size: comparable, not the same."""
    other = saved("gpt2", seed=1)
    result = run("verify", saved("gpt2"), other, expect=1)
    assert result.stdout.startswith("NOT the same function")
    verdict = json.loads(run("verify", saved("gpt2"), other, "--json", expect=1).stdout)
    assert not verdict["same"] and verdict["difference"] > 0.1


def test_verify_options(saved, tmp_path):
    run("random", saved("gpt2"), "--out", tmp_path / "out")
    pair = saved("gpt2"), tmp_path / "out"
    single, double = (
        json.loads(run("verify", *pair, "--json", "--dtype", kind).stdout)
        for kind in ("float32", "float64")
    )
    assert single["same"] and double["same"] and single["difference"] != double["difference"]
    assert json.loads(run("verify", *pair, "--json", "--seed", 5).stdout)["inputs"].endswith(
        "seed 5"
    )
    run("verify", *pair, "--tolerance", 1e-12, expect=1)  # stored in float32, so not that close


def test_seeds(saved, tmp_path):
    """The same seed gives the same bytes in every file; another gives another model."""
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        run("random", saved("neox"), "--out", tmp_path / out, "--seed", seed)
    a, b, c = (bytes_of(tmp_path / out) for out in "abc")
    assert a == b and a.keys() == c.keys()
    assert (
        all(a[file] != c[file] for file in ("model.safetensors", "alignment.safetensors"))
        and a["config.json"] == c["config.json"]
    )


# --residual -> (whether the head stays tied, whether the embedding moves)
RESIDUAL = {"full": (False, True), "permutation": (True, True), "identity": (True, False)}


@pytest.mark.parametrize("verb", ["random", "canonical"])
@pytest.mark.parametrize("residual", RESIDUAL)
def test_residual_and_the_tie(saved, tmp_path, verb, residual):
    tied, moves = RESIDUAL[residual]
    run(verb, saved("gpt2"), "--out", tmp_path / "out", "--residual", residual)
    found, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", saved("gpt2"))
    )
    assert (HEAD not in found) == tied
    assert (
        json.loads((tmp_path / "out/config.json").read_text()).get("tie_word_embeddings", True)
        == tied
    )
    if verb == "random":
        assert (not torch.equal(found[WTE], before[WTE])) == moves
        run(
            "apply",
            tmp_path / "out/alignment.safetensors",
            saved("gpt2"),
            "--out",
            tmp_path / "again",
        )  # it knows its restriction
        assert (
            bytes_of(tmp_path / "again")["model.safetensors"]
            == bytes_of(tmp_path / "out")["model.safetensors"]
        )


def test_no_verify_is_recorded(saved, tmp_path):
    for options, words in (
        ((), "tensors are transports of the source's, computed again"),
        (("--no-verify",), "Not checked: it was written without verification."),
    ):
        out = tmp_path / "-".join(["out", *options])
        result = run("random", saved("bert"), "--out", out, *options)
        assert words in (out / "README.md").read_text()
        assert (
            (json.loads((out / "symmerge.json").read_text())["verified"] is None)
            == bool(options)
            == ("(not verified)" in result.stdout)
        )


def test_overwrite_and_shards(saved, tmp_path):
    out = tmp_path / "out"
    run("random", saved("vit"), "--out", out)
    run("random", saved("vit"), "--out", out, expect=2)
    run("random", saved("vit"), "--out", out, "--overwrite", "--max-shard-size", "0.00005")
    assert (
        not (out / "model.safetensors").exists()
        and len(list(out.glob("model-*-of-*.safetensors"))) > 2
    )
    run("verify", saved("vit"), out)


def test_options_from_yaml(saved, tmp_path):
    """Everything can come from the file; what the command line says wins."""
    file = tmp_path / "options.yaml"
    options = {
        "model": str(saved("gpt2")),
        "out": str(tmp_path / "a"),
        "seed": 4,
        "residual": "permutation",
        "no-verify": True,
    }
    file.write_text(yaml.safe_dump(options))
    assert "(not verified)" in run("random", "--config", file).stdout
    run(
        "random",
        saved("gpt2"),
        "--out",
        tmp_path / "b",
        "--seed",
        4,
        "--residual",
        "permutation",
        "--no-verify",
    )
    run("random", "--config", file, "--out", tmp_path / "c", "--seed", 5)
    a, b, c = (bytes_of(tmp_path / out) for out in "abc")
    assert a == b and a["model.safetensors"] != c["model.safetensors"]


# what people see


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb):
    said = run(verb, "--help").stdout
    examples = said.partition("Examples:")[2].split(f"symmerge {verb} ")[1:]
    assert len(examples) == 3 and "--config" in said


def test_help_lists_the_verbs():
    words = run("--help").stdout
    assert all(verb in words for verb in VERBS) and "Exit codes: 0" in words


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_of_a_verb_is_its_own(verb):
    assert command_for(verb).help.splitlines()[0] == VERBS[verb]


@pytest.mark.parametrize(
    ("words", "loaded"), [(["--help"], set()), (["inspect", "--help"], {"torch"})]
)
def test_help_waits_for_no_heavy_import(words, loaded):
    """The verb's own help is the control."""
    heavy = ("torch", "transformers", "numpy", "scipy")
    code = f"""if True:
        import sys, symmerge.cli
        sys.argv = ["symmerge", *{words}]
        try:
            symmerge.cli.main()
        except SystemExit:
            print(*(name for name in {heavy} if name in sys.modules), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*done.stderr.split()} >= loaded and bool(done.stderr.split()) == bool(loaded)


def test_help_names_every_recipe_and_choice():
    """From the solver's own tables."""
    words = " ".join(run("align", "--help-all").stdout.replace("│", " ").split())
    assert (
        all(
            f"{method.capitalize()}: {abbreviated(names)}." in words
            for method, names in BY_METHOD.items()
        )
        and "correlation, -ff, -attention" in words
    )
    assert "…" not in words  # nothing is cut off
    assert (
        "How heads are compared: best, frobenius, cosine or spectrum." in words
        and "rotation, general or gradient." in words
    )
    assert (
        "How activations are compared: correlation, absolute, cosine, covariance or product."
        in words
    )


# option -> (a value it has not, what the line must say)
WRONG = {
    "--recipe": ("magic", "no recipe called 'magic': choose one of symmerge, weights-only"),
    "--method": ("magic", "--method magic: choose weights"),
    "--metric": ("length", "--metric length: choose best, frobenius, cosine or spectrum"),
    "--inside": ("out", "--inside out: choose rotation, general or gradient"),
    "--dtype": ("int8", "--dtype int8: choose float32, float16 or bfloat16"),
    "--solve-dtype": ("int8", "--solve-dtype int8: choose float32 or float64"),
    "--device": ("abacus", "device abacus: choose cpu or cuda"),
}


@pytest.mark.parametrize("verb", ["align", "merge"])
@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_choice_is_refused(saved, tmp_path, verb, option):
    value, words = WRONG[option]
    result = run(
        verb,
        saved("gpt2"),
        saved("gpt2", seed=1),
        "--out",
        tmp_path / "out",
        option,
        value,
        expect=2,
    )
    assert words in result.stderr and not (tmp_path / "out").exists()


def test_demo():
    rows = json.loads(run("demo", "--symmetries", "--json", "--seed", 1).stdout)
    assert [row["model"] for row in rows] == list(SMALL)
    assert all(row["same function"] == "yes" and row["logit change"] < 1e-4 for row in rows)
    # Of a model that shows its whole stream only what lies inside its blocks moves.
    still = ("dinov3", *(name for name in SMALL if name.endswith("-features")))
    assert all(row["weight change"] > (0.9 if row["model"] in still else 1) for row in rows)


# the real program


def program(*arguments, **options):
    command = [Path(sys.executable).parent / "symmerge", *(str(argument) for argument in arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_an_error_in_a_pipe_is_one_plain_line(tmp_path):
    process = program("inspect", tmp_path / "none")
    out, err = process.communicate(timeout=120)
    assert (
        process.returncode == 2
        and out == ""
        and re.fullmatch(r"error: .*none is not a folder: .*\n", err)
    )


def test_ctrl_c_leaves_nothing(tmp_path):
    small_model(
        "gpt2", n_embd=256, n_inner=1024, n_layer=12, n_head=8, vocab_size=2000
    ).save_pretrained(tmp_path / "model")
    there = tmp_path / "there"
    there.mkdir()
    # A shell may have told background jobs to ignore interrupts, and children inherit that.
    process = program(
        "random",
        tmp_path / "model",
        "--out",
        there / "out",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(there.glob(".out.*.partial/model.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "interrupted: nothing was written\n")
    assert not list(there.iterdir())


def test_the_alignment_is_for_its_own_model(saved, tmp_path):
    """What the library reads back is what the command line kept."""
    run(
        "random", saved("gpt2"), "--out", tmp_path / "out", "--seed", 1, "--residual", "permutation"
    )
    source = sm.load(saved("gpt2")).restrict(residual="permutation")
    alignment = sm.Alignment.load(tmp_path / "out/alignment.safetensors", source.spec)
    expected = sm.Alignment.random(source.spec, torch.Generator().manual_seed(1))
    assert alignment.header["source_sha256"] == source.digest()
    for space, element in expected.elements.items():
        assert all(torch.equal(alignment[space][part], value) for part, value in element.items())


def test_align_merge_same(saved, tmp_path):
    """Align writes two verified checkpoints; merge one; same answers by its exit code."""
    a, b = saved("gpt2"), saved("gpt2", seed=1)
    run("random", a, "--out", tmp_path / "moved")
    assert "the same function up to symmetry" in run("same", a, tmp_path / "moved").stdout
    assert json.loads(run("same", a, b, "--json", expect=1).stdout)["same"] is False
    run("align", a, b, "--out", tmp_path / "pair")
    assert sorted(path.name for path in (tmp_path / "pair").glob("[!.]*")) == [
        "aligned",
        "alignment.safetensors",
        "reference",
        "solution.json",
        "structure.json",
        "verdict.json",
        "verdict.png",
    ]
    run("verify", a, tmp_path / "pair/reference")
    run("verify", b, tmp_path / "pair/aligned")
    run("apply", tmp_path / "pair/alignment.safetensors", b, "--out", tmp_path / "again")
    run("verify", tmp_path / "again", tmp_path / "pair/aligned")
    record = json.loads((tmp_path / "pair/solution.json").read_text())
    assert record["distance_after"] < record["distance_before"] and record["converged"]
    run("merge", a, b, "--out", tmp_path / "merged")
    run("verify", a, tmp_path / "merged", expect=1)
    run("merge", a, b, "--out", tmp_path / "end", "-t", "0", "--method", "none")
    run("verify", a, tmp_path / "end")
    run("align", a, b, "--out", tmp_path / "x", "--method", "magic", expect=2)
