"""Models by their name on the hub, without a network."""

import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import huggingface_hub
import pytest
from fixtures import checkpoint
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from symmerge.checkpoints.hashes import checkpoint_digest
from symmerge.checkpoints.hub import OFFLINE, USER_OFFLINE, is_hub_name, local_folder
from symmerge.errors import CheckpointError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("made"), "bert")


@pytest.fixture
def hub(tmp_path, monkeypatch, made):
    """A hub that gives what is asked for of a folder, and what it was asked."""
    there, asked = tmp_path / "hub", []
    shutil.copytree(made, there)
    (there / "tf_model.h5").touch()
    (there / "model.py").touch()

    def give(name, *, allow_patterns, local_files_only):
        asked.append((name, constants.HF_HUB_OFFLINE))
        if local_files_only:
            raise LocalEntryNotFoundError("not there")
        (tmp_path / "cache").mkdir(exist_ok=True)
        for file in there.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.setenv(USER_OFFLINE, "")
    return there, asked


def test_a_name_is_fetched_without_what_is_not_needed(hub, made):
    there, asked = hub
    (there / "pytorch_model.bin").touch()
    folder = local_folder("owner/model")
    assert checkpoint_digest(folder) == checkpoint_digest(made) and asked == [
        ("owner/model", False)
    ]
    assert not {"pytorch_model.bin", "tf_model.h5", "model.py"} & {
        file.name for file in folder.iterdir()
    }
    assert constants.HF_HUB_OFFLINE  # only for that call


def test_pickles_where_there_is_nothing_else(hub):
    there, asked = hub
    (there / "model.safetensors").rename(there / "pytorch_model.bin")
    assert (local_folder("owner/model") / "pytorch_model.bin").is_file() and len(asked) == 2


def test_folders_are_taken_as_they_are(hub, tmp_path, monkeypatch, made):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "owner" / "model")
    assert (
        local_folder("owner/model") == tmp_path / "owner" / "model"
        and local_folder(str(made)) == made
    )
    for slip in ("owner/modle", "./model", "model", "/a/b", "a/b/c"):
        assert not is_hub_name(slip)
        with pytest.raises(
            CheckpointError, match="is not a folder: give a checkpoint folder, or a name on the hub"
        ):
            local_folder(slip)
    assert hub[1] == []


def test_offline_is_offline(hub, monkeypatch):
    monkeypatch.setenv(USER_OFFLINE, "1")
    with pytest.raises(
        CheckpointError,
        match=r"not fetched before, and HF_HUB_OFFLINE is set; unset it"
        r".*`hf download owner/model --local-dir DIR`",
    ):
        local_folder("owner/model")
    assert hub[1] == [("owner/model", True)]


def test_what_the_hub_refuses_has_a_remedy(monkeypatch):
    def refuse(name, **options):
        raise OSError("401: no such\nmodel")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setenv(USER_OFFLINE, "")
    with pytest.raises(
        CheckpointError,
        match=r"cannot be fetched from the hub \(401: no such model\): check the name.*hf download",
    ):
        local_folder("owner/model")


def test_the_command_line_keeps_what_the_user_said():
    environment = {
        name: value for name, value in os.environ.items() if name not in (OFFLINE, USER_OFFLINE)
    }
    look = (
        f"import os, symmerge.cli; print([os.environ[{OFFLINE!r}], os.environ[{USER_OFFLINE!r}]])"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True
    )
    assert (
        found.stdout.split("\n")[0] == "['1', '']"
        and os.environ[USER_OFFLINE] == os.environ[OFFLINE] == "1"
    )  # as conftest.py says


def test_content_is_what_a_model_is_and_not_where(made, tmp_path):
    other = shutil.copytree(made, tmp_path / "other")
    (other / "README.md").write_text("another card")
    (other / "optimizer.pt").touch()
    assert checkpoint_digest(other) == checkpoint_digest(made)
    for file, other_end in {
        "model.safetensors": lambda end: bytes([end ^ 1]),
        "config.json": lambda end: b" \n",
        "tokenizer.json": lambda end: b" }",
    }.items():
        changed = shutil.copytree(made, tmp_path / file)
        content = (made / file).read_bytes()
        (changed / file).write_bytes(content[:-1] + other_end(content[-1]))
        assert checkpoint_digest(changed) != checkpoint_digest(made), file
