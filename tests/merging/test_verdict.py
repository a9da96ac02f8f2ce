"""The verdict on a merge: true numbers, plain words, and what they are measured on."""

import html
import json
import math
from dataclasses import replace

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.errors import MismatchError, SymmergeError
from symmerge.evaluation.results import LinePoint, TaskRecord
from symmerge.evaluation.tasks import make_task
from symmerge.evaluation.tasks.sampling import Sampling
from symmerge.lab.small_models import small_model
from symmerge.merging.verdict_results import MergeVerdict, SkillRecord, VerdictRow
from symmerge.merging.verdict_words import (
    advice,
    check_worth,
    conclude,
    markdown,
    with_better_place,
)
from symmerge.verification.modules import full_module

TASK = TaskRecord(
    name="clm", data="self", samples=32, seed=1000, metrics=("loss", "perplexity"), settings={}
)


def row(kind, loss, name=""):
    return VerdictRow(name or kind, kind, {"loss": loss, "perplexity": math.exp(loss)})


def rows(merge, average=6.0, parents=(3.0, 3.2)):
    ends = [
        row("parent", loss, f"{letter}: seed") for letter, loss in zip("AB", parents, strict=True)
    ]
    return [*ends, row("average", average), row("merge", merge), row("ensemble", 2.9)]


@pytest.fixture(scope="module")
def pair():
    return [sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1)]


# what the numbers mean


@pytest.mark.parametrize(
    ("merge", "grade"), [(2.9, "better"), (3.1, "good"), (3.4, "usable"), (4.5, "poor")]
)
def test_grades(merge, grade):
    verdict = conclude(replace(TASK, data="books.txt"), rows(merge))
    assert verdict.verdict == grade
    assert ("worse" in verdict.sentences[0]) == (grade in ("usable", "poor"))


def classified(merge, parents=(0.82, 0.82), losses=(0.9, 0.9, 0.8)):
    accuracies = [*parents, merge]
    kinds = ["parent", "parent", "merge"]
    return [
        VerdictRow(kind, kind, {"loss": loss, "accuracy": accuracy, "top5": 1.0})
        for kind, loss, accuracy in zip(kinds, losses, accuracies, strict=True)
    ]


IMAGES = replace(TASK, name="image", data="test.npz", metrics=("loss", "accuracy", "top5"))


@pytest.mark.parametrize(
    ("accuracy", "grade"), [(0.83, "better"), (0.815, "better"), (0.745, "usable"), (0.6, "poor")]
)
def test_a_lower_loss_is_no_excuse_for_a_lower_accuracy(accuracy, grade):
    verdict = conclude(IMAGES, classified(accuracy))
    assert verdict.verdict == grade
    assert ("less confident than its parents" in " ".join(verdict.sentences)) == (grade != "better")
    worse = conclude(IMAGES, classified(0.83, losses=(0.9, 0.9, 1.1)))  # the control: by loss
    assert worse.verdict == "usable" and "less sure" not in " ".join(worse.sentences)


def test_overfitted_parents_are_told():
    trained = replace(IMAGES, data="train.npz")
    seen = SkillRecord("train.npz", trained, tuple(classified(1.0, losses=(0.01, 0.02, 0.2))))
    said = " ".join(conclude(IMAGES, classified(0.82), [seen]).sentences)
    assert "overfitted" in said
    assert "0.10 below their mean there, 0.18 above their mean on the first" in said
    alike = SkillRecord("other.npz", trained, tuple(classified(0.82, losses=(0.8, 0.85, 0.8))))
    one = SkillRecord("other.npz", trained, tuple(classified(0.82, losses=(0.1, 2.5, 0.8))))
    for control in (alike, one):  # no parent, or one alone, is at home there
        said = " ".join(conclude(IMAGES, classified(0.82), [control]).sentences)
        assert "overfitted" not in said


def test_a_better_place_between_the_models_is_named():
    def line(*losses):
        places = enumerate(losses)
        return tuple(LinePoint(at / 4, {"loss": loss, "perplexity": 1.0}) for at, loss in places)

    verdict = conclude(replace(TASK, data="books.txt"), rows(3.4))
    lower = with_better_place(replace(verdict, aligned_line=line(3.0, 2.8, 3.4, 3.5, 3.2)))
    assert lower.sentences[-1].endswith("add -t 0.25.")
    for losses in ((3.0, 3.39, 3.4, 3.5, 3.2), (3.0, 3.1, 3.4, 3.5, 3.2)):
        same = replace(verdict, aligned_line=line(*losses))
        assert with_better_place(same) == same  # the controls: no lower, and closer to A alone


def test_own_text_cannot_say_that_a_merge_is_better():
    verdict = conclude(TASK, rows(2.9))
    assert verdict.verdict == "good" and "better" not in verdict.sentences[0]


def test_the_share_that_is_repaired():
    assert conclude(TASK, rows(3.1)).repaired == pytest.approx(1.0)
    assert conclude(TASK, rows(6.0)).repaired == pytest.approx(0.0)
    assert conclude(TASK, rows(4.55)).repaired == pytest.approx(0.5)
    assert "50 %" in " ".join(conclude(TASK, rows(4.55)).sentences)
    assert "repairs none" in " ".join(conclude(TASK, rows(7.0)).sentences)


def test_an_average_that_does_no_harm_leaves_nothing_to_repair():
    verdict = conclude(TASK, rows(3.1, average=3.1))
    assert verdict.repaired is None and "does no harm" in " ".join(verdict.sentences)


def test_without_an_average_nothing_is_said_of_it():
    kept = [one for one in rows(3.1) if one.kind != "average"]
    verdict = conclude(TASK, kept)
    assert verdict.repaired is None and "averaging" not in " ".join(verdict.sentences)


def test_synthetic_images_give_no_grade():
    unlabelled = replace(TASK, name="image", metrics=())
    metrics = {"loss": 1.0, "agreement": 0.5}
    measured = [VerdictRow(kind, kind, metrics) for kind in ("parent", "average", "merge")]
    verdict = conclude(unlabelled, measured)
    assert verdict.verdict == "unknown" and "--data" in verdict.sentences[0]


def test_what_to_do_next():
    verdict = conclude(TASK, rows(3.4))
    further = advice(verdict, "symmerge merge a b", "out", best=False).next
    assert further[0].endswith("--effort best") and "--data FILE" in further[1]
    assert not any("best" in line for line in advice(verdict, "merge", "out", best=True).next)


def test_a_verdict_can_be_written_and_read(tmp_path):
    verdict = conclude(TASK, rows(3.4))
    verdict.write(tmp_path / "verdict.json")
    assert MergeVerdict.read(tmp_path / "verdict.json") == verdict
    assert "| merge | 3.4 | 29.96 |" in markdown(verdict)
    with pytest.raises(SymmergeError, match="no merge"):
        MergeVerdict.from_json({**verdict.to_json(), "rows": []})


def test_a_merge_of_no_use_is_refused():
    useless = conclude(TASK, rows(5.9))
    with pytest.raises(MismatchError, match=r"far worse than its parents.*--anyway"):
        check_worth(useless)
    for fine in (conclude(TASK, rows(4.5)), conclude(TASK, rows(3.4, average=3.3)), None):
        check_worth(fine)  # the control


# what is measured


def test_the_rows_are_the_losses_of_the_models(pair):
    merged = sm.average(*pair)
    task = make_task("clm", "self", pair, samples=4, length=12, seed=5)
    verdict = sm.judge(merged, pair, task)
    for model, measured in zip(pair, verdict.of("parent"), strict=True):
        alone = task.evaluate(full_module(model, torch.float32))
        assert measured.loss == pytest.approx(alone["loss"], rel=1e-5)
    # Without an alignment, the merge is the plain average.
    assert verdict.of("merge")[0].loss == pytest.approx(verdict.of("average")[0].loss, rel=1e-5)
    assert verdict.of("parent")[0].loss != pytest.approx(verdict.of("merge")[0].loss, rel=1e-4)


def test_the_line_has_the_parents_at_its_ends(pair):
    result = sm.align(*pair, "fast")
    task = make_task("clm", "self", pair, samples=4, length=12, seed=5)
    verdict = sm.judge(sm.average(*result.models), pair, task, aligned=result.models)
    a, b = (one.loss for one in verdict.of("parent"))
    for line in (verdict.aligned_line, verdict.plain_line):
        assert [point.t for point in line] == [0, 0.25, 0.5, 0.75, 1]
        assert (line[0].metrics["loss"], line[-1].metrics["loss"]) == (a, b)
    assert verdict.aligned_line[2].metrics["loss"] == verdict.of("merge")[0].loss


def test_an_ensemble_is_at_least_as_good_as_the_mean_of_its_parents(pair):
    verdict = sm.judge(sm.average(*pair), pair)
    parents = [one.loss for one in verdict.of("parent")]
    assert verdict.of("ensemble")[0].loss <= sum(parents) / 2


def test_the_same_seed_gives_the_same_verdict(pair):
    merged = sm.average(*pair)
    assert sm.judge(merged, pair, seed=3) == sm.judge(merged, pair, seed=3)
    assert sm.judge(merged, pair, seed=3) != sm.judge(merged, pair, seed=4)


def test_a_classifier_of_texts_needs_data(tmp_path):
    names = [checkpoint(tmp_path / str(seed), "bert-classifier", seed=seed) for seed in (0, 1)]
    models = [sm.load(name) for name in names]
    with pytest.raises(MismatchError, match="needs labelled data"):
        sm.judge(sm.average(*models), models)


# what is set aside


def test_nothing_is_learned_from_what_judges():
    for available in (5, 40, 1000):
        how = {"seed": 3, "max_samples": 10_000}
        learned = Sampling(part="learn", **how).choose(available, 64, what="text")
        judged = Sampling(part="judge", **how).choose(available, 64, what="text")
        assert not {*learned} & {*judged} and learned and judged
        assert len(judged) == max(1, min(64, available // 5))
    everything = Sampling(part="all", seed=3, max_samples=10_000).choose(40, 64, what="text")
    assert sorted(everything) == list(range(40))  # the control


# on the command line


def test_merge_ends_with_a_verdict(tmp_path):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    said = run("merge", a, b, "--effort", "fast", "--out", tmp_path / "out").stdout
    verdict = MergeVerdict.read(tmp_path / "out" / "verdict.json")
    assert verdict.sentences[0] in said and "plain average" in said
    assert f"next: symmerge report {tmp_path / 'out'}" in said
    assert str(tmp_path) not in (tmp_path / "out" / "verdict.json").read_text()
    assert (tmp_path / "out" / "verdict.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "page.html"
    run("report", tmp_path / "out", "--out", page)
    assert verdict.sentences[0] in html.unescape(page.read_text())


def test_what_is_of_no_use_is_written_if_asked_for(tmp_path, monkeypatch):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    useless = conclude(TASK, rows(5.9))
    monkeypatch.setattr("symmerge.merging.pipeline.judge_alignment", lambda *_, **__: useless)
    flags = ("--effort", "fast", "--out", tmp_path / "out")
    assert "Nothing was written" in run("merge", a, b, *flags, expect=2).stderr
    assert not (tmp_path / "out").exists()
    run("merge", a, b, *flags, "--anyway")
    assert MergeVerdict.read(tmp_path / "out" / "verdict.json").verdict == "poor"


def test_no_verdict_if_not_asked_for(tmp_path):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    flags = ("--effort", "fast", "--no-verdict")
    said = run("merge", a, b, *flags, "--out", tmp_path / "out").stdout
    assert "plain average" not in said and not (tmp_path / "out" / "verdict.json").exists()


def test_a_merge_does_not_fail_for_want_of_a_verdict(tmp_path):
    a, b = (checkpoint(tmp_path / name, "bert", seed=seed) for seed, name in enumerate("ab"))
    (a / "tokenizer.json").write_text("")  # masked text needs the mask token
    flags = ("--method", "none", "--out", tmp_path / "out")
    said = run("merge", a, b, *flags).stderr
    assert "the merge was not measured: the tokenizer of" in said
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "verdict.json").exists()
    (tmp_path / "text.txt").write_text("some words " * 400)
    more = ("--data", tmp_path / "text.txt", "--overwrite")
    assert "tokenizer" in run("merge", a, b, *flags, *more, expect=2).stderr  # the control


def test_align_judges_the_midpoint(tmp_path):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    printed = run("align", a, b, "--effort", "fast", "--json", "--out", tmp_path / "out").stdout
    stored = MergeVerdict.read(tmp_path / "out" / "verdict.json")
    assert json.loads(printed)["verdict"] == stored.to_json()


def test_models_of_one_origin_are_told_at_once(tmp_path):
    a = checkpoint(tmp_path / "a", "gpt2")
    model = small_model("gpt2")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "b")
    stranger = checkpoint(tmp_path / "c", "gpt2", seed=1)
    flags = ("--effort", "fast", "--dry-run", "--out", tmp_path / "out")
    assert "already aligned" in run("merge", a, tmp_path / "b", *flags).stdout
    assert "already aligned" not in run("merge", a, stranger, *flags).stdout


# skills


def skill(name, parents, merge, data="self"):
    """Losses of two parents and their merge on one kind of text."""
    losses = [("parent", parents[0]), ("parent", parents[1]), ("merge", merge)]
    task = replace(TASK, data=data)
    return SkillRecord(name, task, tuple(row(kind, loss) for kind, loss in losses))


def test_skills_are_told_where_parents_know_different_texts():
    apart = [skill("text of A", (3.9, 6.3), 4.1), skill("text of B", (6.8, 4.1), 4.3)]
    alike = [skill("text of A", (3.9, 4.4), 4.1), skill("text of B", (4.5, 4.1), 4.3)]
    told = " ".join(conclude(TASK, rows(3.1), apart).sentences)
    assert "different skills" in told and "the merge 4.30" in told
    assert "different skills" not in " ".join(conclude(TASK, rows(3.1), alike).sentences)
    data = [replace(one, task=replace(TASK, data="x.txt")) for one in alike]
    assert "different skills" in " ".join(conclude(TASK, rows(3.1), data).sentences)
    worse = [skill("x", (3.0, 4.0), 4.1, "x"), skill("y", (3.1, 4.1), 4.1, "y")]  # the control
    assert "different skills" not in " ".join(conclude(TASK, rows(3.1), worse).sentences)


def test_every_model_is_measured_on_the_text_of_each_parent(pair):
    verdict = sm.judge(sm.average(*pair), pair)
    of_a, of_b = verdict.skills
    assert (of_a.name, of_b.name) == ("text of A", "text of B")
    assert of_a.rows[0].loss < of_a.rows[1].loss and of_b.rows[1].loss < of_b.rows[0].loss
    for at, row in enumerate(verdict.rows):
        each = [one.rows[at] for one in verdict.skills]
        assert row.loss == pytest.approx(sum(one.loss for one in each) / 2, rel=1e-6)
        assert {one.name for one in each} == {row.name}
    assert verdict == MergeVerdict.from_json(json.loads(json.dumps(verdict.to_json())))
    assert "on text of A" in markdown(verdict)


def test_skills_may_be_data(tmp_path):
    folders = [checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab")]
    models = [sm.load(folder) for folder in folders]
    for name, text in (("x.txt", "some words "), ("y.txt", "1 2 3 4 5 ")):
        (tmp_path / name).write_text(text * 100)
    files = [str(tmp_path / name) for name in ("x.txt", "y.txt")]
    verdict = sm.judge(sm.average(*models), models, skills=files)
    assert [one.name for one in verdict.skills] == ["x.txt", "y.txt"]
    assert verdict.task.metrics == ("loss", "perplexity")
    alone = sm.evaluate(models, files[0]).models[0].metrics["loss"]
    assert verdict.skills[0].rows[0].loss == pytest.approx(alone, rel=1e-5)
