"""Model cards: what the hub reads, no paths of this machine, and only what is true."""

import json

import pytest
from fixtures import checkpoint, run
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

import symmerge as sm
from symmerge.checkpoints.card import public_name, without_paths
from symmerge.checkpoints.licenses import joint_license, read_license
from symmerge.lab.small_models import small_model


def card_text(folder, license=None):
    front = f"---\nlicense: {license}\n---\n" if license else "---\ntags: [x]\n---\n"
    (folder / "README.md").write_text(f"{front}# A model\n")
    return folder


@pytest.fixture
def parents(tmp_path):
    return [checkpoint(tmp_path / f"seed-{seed}", "gpt2", seed=seed) for seed in (0, 1)]


def merged_card(parents, out, *flags):
    run("merge", *parents, "--effort", "fast", *flags, "--out", out)
    return ModelCard.load(out / "README.md")


def test_the_hub_can_read_a_card(parents, tmp_path):
    for parent in parents:
        card_text(parent, "apache-2.0")
    card = merged_card(parents, tmp_path / "out")
    data = card.data.to_dict()
    assert data["base_model"] == ["seed-0", "seed-1"] and data["license"] == "apache-2.0"
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["merge", "symmerge"]
    for name in data["base_model"]:
        validate_repo_id(name)


def test_a_card_names_no_folder_of_this_machine(parents, tmp_path):
    card = merged_card(parents, tmp_path / "out").content
    assert str(tmp_path) not in card and "/tmp" not in card
    assert str(tmp_path) in (tmp_path / "out" / "symmerge.json").read_text()  # the control


def test_links_of_a_card_work(parents, tmp_path):
    card = merged_card(parents, tmp_path / "out").content
    for file in ("symmerge.json", "verdict.png"):
        assert f"({file})" in card and (tmp_path / "out" / file).is_file()


def test_licences_that_differ_are_named(parents, tmp_path):
    card_text(parents[0], "mit")
    card_text(parents[1], "llama3.1")
    card = merged_card(parents, tmp_path / "out", "--no-verdict")
    assert card.data.license == "other" and "licences differ" in card.content
    assert "mit and llama3.1" in card.content


def test_an_unknown_licence_is_not_made_up(parents, tmp_path):
    card = merged_card(parents, tmp_path / "out", "--no-verdict")
    assert card.data.license is None and "licences differ" not in card.content


def test_aligned_is_said_only_where_it_is_true(parents, tmp_path):
    aligned = merged_card(parents, tmp_path / "aligned", "--no-verdict").content
    plain = ("--method", "none", "--no-verdict", "--out", tmp_path / "plain")
    run("merge", *parents, *plain)
    unaligned = (tmp_path / "plain" / "README.md").read_text()
    assert "were aligned by their symmetries" in aligned
    assert "without alignment" in unaligned and "aligned by their symmetries" not in unaligned


def test_the_usage_of_a_card_runs(parents, tmp_path):
    merged_card(parents, tmp_path / "out", "--no-verdict")
    text = (tmp_path / "out" / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(code.replace("path/to/this/model", str(tmp_path / "out")), names)
    assert type(names["model"]).__name__ == "GPT2LMHeadModel"


def test_a_moved_model_names_its_source(parents, tmp_path):
    card_text(parents[0], "mit")
    run("random", parents[0], "--out", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == ["seed-0"] and card.data.license == "mit"
    assert card.data.tags == ["symmerge"]


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ('---\r\ntags: [a]\r\nlicense: "Apache-2.0"\r\n---\r\n', "apache-2.0"),
        ("license: mit\n", None),  # no front matter
        ("---\ntags: [a]\n---\nlicense: mit\n", None),  # below it
        ("---\nlicense: [mit, gpl]\n---\n", None),
        ("---\nlicense: !!python/object/apply:os.system [ls]\n---\n", None),
        ("", None),
    ],
)
def test_licences_are_read_from_front_matter(tmp_path, text, license):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert read_license(tmp_path) == license


def test_a_folder_without_a_card_has_no_licence(tmp_path):
    assert read_license(tmp_path) is None and read_license(None) is None
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\xfe\n---\n")
    assert read_license(tmp_path) is None
    assert joint_license(["mit", None]) == "other"


@pytest.mark.parametrize("name", ["a", "a b", "- x", "yes", "1e3", 'q"uote', "#", "ünï"])
def test_names_are_quoted_for_yaml(tmp_path, name):
    model = sm.load(small_model("gpt2"))
    folder = tmp_path / name
    sm.save(model, folder)
    moved = sm.random_member(sm.load(folder), seed=1)[1]
    sm.save(moved, tmp_path / "out")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == [name]


def test_names_without_folders():
    assert public_name("a/b/c") == "c" and public_name("owner/name") == "owner/name"
    assert without_paths("0.5 x ../a/b, then ./c") == "0.5 x b, then c"


def test_provenance_of_older_versions_can_be_read(tmp_path):
    """Fields that are new have defaults."""
    sm.save(sm.load(small_model("gpt2")), tmp_path / "m")
    record = json.loads((tmp_path / "m" / "symmerge.json").read_text())
    del record["task"]
    from symmerge.checkpoints.provenance import Provenance

    assert Provenance.from_json(record).task == ""
