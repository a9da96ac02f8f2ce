"""The verb kinship: pairs, merges, the index of fingerprints, a page, and bad input."""

import json
import shutil

import pytest
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.lineage.results import IndexMatches, Kinship, MergeShares


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two seeds, a random member of the first, and their merge."""
    root = tmp_path_factory.mktemp("kinship")
    seeds = [checkpoint(root / f"seed-{seed}", "gpt2", seed=seed) for seed in (0, 1)]
    sm.save(sm.random_member(sm.load(seeds[0]), 3)[1], root / "disguised")
    sm.save(sm.mean([*sm.align(*seeds, "weights-only").models], [0.7, 0.3]), root / "merge")
    return root


def test_a_pair_and_its_page(place, tmp_path):
    found = run("kinship", place / "seed-0", place / "disguised", "--out", tmp_path / "out")
    assert "one function in different coordinates" in found.stdout
    stored = Kinship.read(tmp_path / "out" / "kinship.json")
    assert stored.related and stored.relation == "same function"
    page = (tmp_path / "out" / "page.html").read_text("utf-8")
    assert page.count('id="s1-kinship-desc"') == 1 and "units, outgoing" in page
    strangers = run("kinship", place / "seed-0", place / "seed-1", "--json", expect=1)
    assert not Kinship.from_json(json.loads(strangers.stdout)).related


def test_a_merge_and_its_candidates(place):
    found = run("kinship", *(place / name for name in ("merge", "seed-0", "seed-1")), "--json")
    parsed = MergeShares.from_json(json.loads(found.stdout))
    assert [round(one.share, 1) for one in parsed.parents] == [0.7, 0.3]
    assert parsed.parents[0].related and "0.7" in repr(parsed)


def test_an_index_of_fingerprints(place, tmp_path):
    index = tmp_path / "index"
    run("kinship", "--index", index, "--add", place / "seed-0", place / "seed-1")
    checkpoint(tmp_path / "llama", "llama")
    run("kinship", "--index", index, "--add", tmp_path / "llama")
    files = sorted(index.iterdir())
    assert len(files) == 3 and all(file.stat().st_size <= 2_000_000 for file in files)
    found = run("kinship", "--index", index, place / "disguised", "--json")
    first, second, third = IndexMatches.from_json(json.loads(found.stdout)).matches
    assert first.related and first.model.endswith("seed-0") and first.p < 1e-4
    assert not second.related and second.model.endswith("seed-1")
    assert third.p is None and "other embeddings" in third.note
    shutil.copy(files[0], tmp_path / "damaged.fingerprint")
    content = (tmp_path / "damaged.fingerprint").read_bytes()
    (index / "damaged.fingerprint").write_bytes(content[: len(content) // 2])
    assert "write it again" in run("kinship", "--index", index, place / "merge", expect=2).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("seed-0",), "give a model and one or more candidates"),
        ((), "no model"),
        (("seed-0", "nowhere"), "nowhere"),
        (("--add", "seed-0"), "--index FOLDER"),
        (("--index", "nowhere", "seed-0"), "holds no fingerprints"),
        (("--index", "nowhere", "seed-0", "seed-1"), "compares one model"),
        (("seed-0", "seed-1", "merge", "--out", "x"), "only a comparison of two models"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_one_line(place, monkeypatch, arguments, words):
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    said = run("kinship", *arguments, expect=2).stderr
    assert words in " ".join(said.split()) and "Traceback" not in said
    assert sorted(place.iterdir()) == before


def test_a_truncated_file_is_an_error_and_nothing_is_written(place, tmp_path):
    shutil.copytree(place / "seed-1", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = run("kinship", place / "seed-0", tmp_path / "cut", "-o", tmp_path / "x", expect=2)
    assert "cut" in said.stderr and not (tmp_path / "x").exists()
