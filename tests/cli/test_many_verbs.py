"""align and merge with three models or more, ways to combine, and the mergekit config."""

import json

import pytest
import torch
import yaml
from fixtures import checkpoint, run, tokenizer

import symmerge as sm

FAST = ("--recipe", "weights-only")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [checkpoint(folder / f"seed-{seed}", "gpt2", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def aligned(three, tmp_path_factory):
    out = tmp_path_factory.mktemp("aligned") / "out"
    run("align", *three, "--out", out, *FAST, "--mergekit", out.parent / "recipe.yaml")
    return out


def test_align_writes_every_model_verified(three, aligned):
    assert {path.name for path in aligned.iterdir() if path.is_dir()} == {
        "reference",
        "aligned-1",
        "aligned-2",
    }
    for before, after in zip(three, ("reference", "aligned-1", "aligned-2"), strict=True):
        assert sm.verify(sm.load(before), sm.load(aligned / after)).same
        assert not sm.verify(
            sm.load(three[0 if after == "aligned-2" else 2]), sm.load(aligned / after)
        ).same
    record = json.loads((aligned / "universe.json").read_text())
    assert (
        record["cycle_error"] <= 1e-6
        and record["spreads"][-1] <= record["spreads"][0]
        and record["reference"] == 0
    )


def test_the_page_shows_the_rounds(aligned, tmp_path):
    run("report", aligned, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "The rounds" in page and "cycle error" in page and "The merge beside its parents" in page


def test_one_member_can_be_applied_again(three, aligned, tmp_path):
    run("apply", aligned / "alignment-2.safetensors", three[2], "--out", tmp_path / "again")
    again, before = sm.load(tmp_path / "again"), sm.load(aligned / "aligned-2")
    assert all(torch.equal(again.weights[name], before.weights[name]) for name in before.weights)


def test_the_recipe_for_mergekit_names_what_was_written(aligned):
    recipe = yaml.safe_load((aligned.parent / "recipe.yaml").read_text())
    assert recipe["merge_method"] == "linear"
    assert [entry["model"] for entry in recipe["models"]] == [
        str(aligned / name) for name in ("reference", "aligned-1", "aligned-2")
    ]


def test_merge_is_the_weighted_mean_of_what_align_wrote(three, aligned, tmp_path):
    said = run("merge", *three, "--out", tmp_path / "out", *FAST, "--weights", "0.5,0.3,0.2").stdout
    parts = [sm.load(aligned / name) for name in ("reference", "aligned-1", "aligned-2")]
    merged, wanted = sm.load(tmp_path / "out"), sm.mean(parts, [0.5, 0.3, 0.2])
    assert (
        max(
            (merged.weights[name] - wanted.weights[name]).abs().max().item()
            for name in merged.weights
        )
        <= 1e-6
    )
    assert "0.3 x" in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "rounds" in card and all(folder.name in card for folder in three)


def test_weights_that_do_not_sum_to_one_are_normalised_and_said(three, tmp_path):
    result = run(
        "merge", *three, "--out", tmp_path / "out", "--method", "none", "--weights", "1,1,2"
    )
    assert "sum to 4" in result.output
    wanted = sm.mean([sm.load(folder) for folder in three], [0.25, 0.25, 0.5])
    merged = sm.load(tmp_path / "out")
    assert (
        max(
            (merged.weights[name] - wanted.weights[name]).abs().max().item()
            for name in merged.weights
        )
        <= 1e-6
    )


@pytest.mark.parametrize("how", ["slerp", "ties", "dare"])
def test_two_models_combine_in_other_ways(how, three, tmp_path):
    run("merge", *three[:2], "--out", tmp_path / "out", *FAST, "--combine", how)
    found = sm.align(sm.load(three[0]), sm.load(three[1]), sm.WeightMatching(generate_text=False))
    wanted = sm.combine([found.reference, found.aligned], how)
    merged, average = sm.load(tmp_path / "out"), sm.average(found.reference, found.aligned)
    assert (
        max(
            (merged.weights[name] - wanted.weights[name]).abs().max().item()
            for name in merged.weights
        )
        <= 1e-6
    )
    assert (
        max(
            (merged.weights[name] - average.weights[name]).abs().max().item()
            for name in merged.weights
        )
        > 1e-3
    )


def test_a_soup_is_chosen_by_held_out_data(three, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 400)
    said = run(
        "merge",
        *three,
        "--out",
        tmp_path / "out",
        *FAST,
        "--combine",
        "soup",
        "--data",
        tmp_path / "text.txt",
    ).stdout
    assert "Soup" in said and "soup of" in said
    assert "left out" in (tmp_path / "out" / "README.md").read_text() or "of 3 models" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-t", "0.3"], "give --weights"),
        (["--weights", "1,2"], "one weight per model"),
        (["--weights", "1,x,2"], "one number per model"),
        (["--weights=-1,1,1"], "0 or larger"),
        (["--combine", "slerp"], "use mean, ties or dare"),
        (["--combine", "stew"], "choose mean"),
        (["--combine", "soup"], "give --data"),
        (["--combine", "soup", "--data", "none.txt"], "none.txt does not exist"),
        (["--attention", "svd"], "two models"),
        (["--at", "ff=0.3"], "two models"),
        (["--reference", "3"], "number from 0 to 2"),
        (["--reference", "middle"], "medoid"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(words, told, three, tmp_path):
    assert told in " ".join(
        run("merge", *three, "--out", tmp_path / "out", *words, expect=2).output.split()
    )
    assert not (tmp_path / "out").exists()


def test_one_model_and_models_that_differ_are_refused(three, tmp_path):
    for verb in ("align", "merge"):
        assert "two or more models" in " ".join(
            run(verb, three[0], "--out", tmp_path / "out", expect=2).output.split()
        )
        assert "given twice" in " ".join(
            run(verb, three[0], three[0], "--out", tmp_path / "out", expect=2).output.split()
        )
    odd = checkpoint(tmp_path / "odd", "gpt2", n_positions=32)
    assert "odd" in run("align", *three, odd, "--out", tmp_path / "out", *FAST, expect=2).output
    assert (
        "--reference"
        in run("align", *three[:2], "--out", tmp_path / "out", "--reference", "1", expect=2).output
    )
    assert (
        "no folder"
        in run(
            "align",
            *three,
            "--out",
            tmp_path / "out",
            "--mergekit",
            tmp_path / "gone" / "r.yaml",
            expect=2,
        ).output
    )


@pytest.mark.parametrize("units", ["zero", "split"])
def test_a_narrow_model_is_merged_into_a_wide_one(units, three, tmp_path):
    narrow = checkpoint(tmp_path / "narrow", "gpt2", seed=5, n_embd=32, n_inner=64)
    for pair, which in (((three[0], narrow), "aligned"), ((narrow, three[0]), "reference")):
        out = tmp_path / which
        said = run("align", *pair, "--out", out, *FAST, "--units", units).output
        assert "narrower" in said
        assert sm.verify(
            sm.load(narrow), sm.load(out / which)
        ).same  # as wide, and still the same function
        assert sm.load(out / which).config["n_embd"] == 48
        assert not sm.verify(sm.load(three[0]), sm.load(out / which)).same
    run("merge", three[0], narrow, "--out", tmp_path / "merged", *FAST, "--units", units)
    assert (
        sm.load(tmp_path / "merged").config["n_embd"] == 48
        and "widen" in (tmp_path / "merged" / "README.md").read_text()
    )


def test_what_differs_in_more_than_width_is_refused(three, tmp_path):
    deep = checkpoint(tmp_path / "deep", "gpt2", n_layer=3)
    assert (
        "n_layer 2 / 3" in run("align", three[0], deep, "--out", tmp_path / "out", expect=2).output
    )
    assert (
        "--units"
        in run("align", *three[:2], "--out", tmp_path / "out", "--units", "some", expect=2).output
    )


def test_many_are_learned_together(three, tmp_path):
    words = (
        "--method",
        "learned",
        "--steps",
        "4",
        "--samples",
        "6",
        "--start-from",
        "weights",
        "--tries",
        "1",
        "--concentration",
        "1",
    )
    run("align", *three, "--out", tmp_path / "out", *words)
    record = json.loads((tmp_path / "out" / "universe.json").read_text())
    assert (
        record["settings"]["learned"]["steps"] == 4
        and record["settings"]["concentration"] == 1.0
        and record["cycle_error"] <= 1e-6
    )
    assert record["settings"]["losses"][0] >= min(record["settings"]["losses"])
    assert sm.verify(sm.load(three[2]), sm.load(tmp_path / "out" / "aligned-2")).same


def test_models_with_different_vocabularies_share_what_they_can(three, tmp_path):
    other = checkpoint(tmp_path / "other", "gpt2", seed=7, vocab_size=90)
    tokenizer(80).save_pretrained(other)
    assert (
        "vocab" in run("merge", three[0], other, "--out", tmp_path / "out", *FAST, expect=2).output
    )
    run("merge", three[0], other, "--out", tmp_path / "out", *FAST, "--shared-tokens")
    merged = sm.load(tmp_path / "out")
    assert (
        merged.spec.sizes["vocabulary"] == 101
        and "shared" in (tmp_path / "out" / "README.md").read_text()
    )
    run("align", three[0], other, "--out", tmp_path / "pair", *FAST, "--shared-tokens")
    assert sm.verify(sm.load(three[0]), sm.load(tmp_path / "pair" / "reference")).same
    assert (
        "two models"
        in run("merge", *three, "--out", tmp_path / "no", "--shared-tokens", expect=2).output
    )
