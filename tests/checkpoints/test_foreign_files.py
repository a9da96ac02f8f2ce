"""What is not ours is not touched: foreign files, links, code of a checkpoint."""

import ast
import os
from pathlib import Path

import pytest
from fixtures import checkpoint, run

import symmerge
from symmerge.checkpoints.files import refuse_foreign, set_aside, write_text
from symmerge.checkpoints.folders import CONTENTS, add_to_contents, new_folder
from symmerge.errors import CheckpointError, SymmergeWarning
from symmerge.models.model import load
from symmerge.models.saving import save

SOURCES = sorted(Path(symmerge.__file__).parent.rglob("*.py"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source") / "model", "gpt2")


@pytest.fixture
def model(source, tmp_path):
    """A copy that a test may damage."""
    import shutil

    return Path(shutil.copytree(source, tmp_path / "model"))


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def calls(tree, name):
    """Calls of a method of this name."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    ]


def test_every_from_pretrained_refuses_code_of_the_checkpoint():
    found = [
        (path.name, call)
        for path in SOURCES
        for call in calls(ast.parse(path.read_text("utf-8")), "from_pretrained")
    ]
    assert [name for name, _ in found] == ["pretrained.py"], "go through from_local"
    options = {item.arg: ast.unparse(item.value) for item in found[0][1].keywords}
    assert options["trust_remote_code"] == "False" and options["local_files_only"] == "True"


def test_overwrite_replaces_only_what_symmerge_wrote(model, tmp_path):
    out = tmp_path / "out"
    save(load(model), out)
    save(load(model), out, overwrite=True)  # ours alone: replaced
    before = listing(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"did not write \(notes\.txt\)"):
        save(load(model), out, overwrite=True)
    assert listing(out) == sorted([*before, "notes.txt"])
    assert listing(tmp_path) == sorted(
        [*listing_of(tmp_path, model), *listing_of(tmp_path, out)]
    ), "no .partial stays behind"


def listing_of(root, folder):
    name = folder.relative_to(root)
    return [str(name), *(str(name / entry) for entry in listing(folder))]


@pytest.mark.parametrize("strange", [".git/HEAD", "empty/", "deep/er/file"])
def test_overwrite_refuses_a_folder_of_the_user(model, tmp_path, strange):
    out = tmp_path / "work"
    (out / strange).parent.mkdir(parents=True)
    (out / strange).mkdir() if strange.endswith("/") else (out / strange).write_text("x")
    before = listing(out)
    run("random", model, "--out", out, "--overwrite", expect=2)
    assert listing(out) == before


def test_a_linked_output_is_followed(model, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    for overwrite in (False, True):
        save(load(model), tmp_path / "link", overwrite=overwrite)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_nested_folder_is_ours_too(tmp_path):
    for overwrite in (False, True):
        with new_folder(tmp_path / "out", overwrite=overwrite) as folder:
            with new_folder(folder / "inner") as inner:
                (inner / "file").write_text("x")
            (folder / "other").write_text("y")
    assert listing(tmp_path / "out") == sorted(
        [CONTENTS, "inner", f"inner/{CONTENTS}", "inner/file", "other"]
    )


@pytest.mark.parametrize("name", ["/etc/hostname", "../elsewhere.safetensors"])
def test_an_index_cannot_leave_the_folder(model, tmp_path, name):
    (tmp_path / "elsewhere.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(CheckpointError, match="is outside"):
        load(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_refused(model, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_bytes((model / name).read_bytes())
    (model / name).unlink()
    (model / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(model)


def test_links_of_the_hubs_cache_are_read(model, tmp_path):
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    model.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert load(snapshot).parameters > 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_fifo_does_not_hang(model, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(model)


def test_report_and_mergekit_replace_only_their_own(model, tmp_path):
    other = checkpoint(tmp_path / "other", "gpt2", seed=1)
    page, recipe = tmp_path / "page.html", tmp_path / "recipe.yaml"
    pair = (model, other, "--recipe", "permutations")
    for file in (page, recipe):
        file.write_text("mine")
    run("align", *pair, "--out", tmp_path / "a", "--mergekit", recipe, expect=2)
    assert not (tmp_path / "a").exists() and recipe.read_text() == "mine"
    recipe.unlink()
    for overwrite in ((), ("--overwrite",)):
        run("align", *pair, "--out", tmp_path / "a", "--mergekit", recipe, *overwrite)
    run("report", tmp_path / "a", "--out", page, expect=2)
    assert page.read_text() == "mine"
    page.unlink()
    for _ in range(2):
        run("report", tmp_path / "a", "--out", page)
    run("report", tmp_path / "a", "--out", tmp_path / "a" / "page.html")
    run("align", *pair, "--out", tmp_path / "a", "--overwrite")  # its page is ours, too


def test_what_can_be_resumed_is_kept(model, tmp_path):
    other = checkpoint(tmp_path / "other", "gpt2", seed=1)
    left = tmp_path / "out.partial.safetensors"
    left.write_bytes(b"of an earlier run")
    said = run("align", model, other, "--recipe", "permutations", "--out", tmp_path / "out")
    assert "to continue that run" in " ".join(said.output.split())
    assert left.with_name(f"{left.name}.bak").read_bytes() == b"of an earlier run"


def test_only_small_files_are_copied_along(model, tmp_path):
    """A sparse file of 8 GB takes no room, its copy would."""
    for name, size in (("log.csv", 8 << 30), ("notes.txt", 10)):
        (model / name).touch()
        os.truncate(model / name, size)
    out = save(load(model), tmp_path / "out")
    assert (out / "notes.txt").exists() and not (out / "log.csv").exists()


def test_a_tokenizer_of_gigabytes_is_refused_when_the_model_is_opened(model):
    (model / "tokenizer.json").touch()
    os.truncate(model / "tokenizer.json", 8 << 30)
    with pytest.raises(CheckpointError, match="100,000,000 at most"):
        load(model)


def test_what_was_written_again_is_not_replaced(model, tmp_path):
    """A user trained what symmerge wrote, and saved it in the same place."""
    out = tmp_path / "out"
    save(load(model), out)
    later = (out / CONTENTS).stat().st_mtime_ns + 10**9
    weights = out / "model.safetensors"
    os.utime(weights, ns=(later, later))
    before = weights.read_bytes()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            save(load(model), out, overwrite=True)
        assert weights.read_bytes() == before
        add_to_contents(out, "page.html")  # a report does not make it ours again


def test_an_alignment_in_the_output_is_not_replaced(model, tmp_path):
    out = tmp_path / "out"
    run("random", model, "--out", out)
    before = (out / "alignment.safetensors").read_bytes()
    run("apply", out / "alignment.safetensors", model, "--out", out, "--overwrite", expect=2)
    assert (out / "alignment.safetensors").read_bytes() == before
    run("apply", out / "alignment.safetensors", model, "--out", tmp_path / "other")  # the control


def test_every_copy_of_an_interrupted_run_is_kept(tmp_path):
    file = tmp_path / "out.partial.safetensors"
    for content in ("first", "second", "third"):
        file.write_text(content)
        with pytest.warns(SymmergeWarning, match="is now"):
            set_aside(file)
    assert {copy.read_text() for copy in tmp_path.iterdir()} == {"first", "second", "third"}


@pytest.mark.parametrize("there", [True, False])
def test_a_linked_file_is_followed(tmp_path, there):
    link, place = tmp_path / "link.html", tmp_path / "elsewhere" / "page.html"
    place.parent.mkdir()
    if there:
        place.write_text("old")
    link.symlink_to(place)
    write_text(link, "new")
    assert link.is_symlink() and place.read_text() == "new"
    assert listing(tmp_path) == ["elsewhere", "elsewhere/page.html", "link.html"]


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"):
        write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()


def test_a_way_back_makes_no_folder(model, tmp_path):
    save(load(model), tmp_path / "new" / ".." / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_mark_is_looked_for_at_the_start_of_a_file(tmp_path):
    """A file of gigabytes is not read to refuse it."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.write_text("a mark, and more")
    other.write_text(f"{' ' * 100_000}a mark")
    refuse_foreign(ours, "a mark")
    with pytest.raises(CheckpointError, match="did not write it"):
        refuse_foreign(other, "a mark")
