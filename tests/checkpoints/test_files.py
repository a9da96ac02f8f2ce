"""Files are replaced atomically: complete, or as they were."""

import os

import pytest

from symmerge.checkpoints.files import read_json, replacing, write_json, write_text
from symmerge.errors import CheckpointError


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    target = tmp_path / "new" / "x.npy"
    for text in ("one", "two"):
        with replacing(target) as beside:
            beside.write_text(text)
            assert beside.suffix == ".npy" and beside.name.startswith(".")
        assert target.read_text() == text and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_there(error, tmp_path):
    target = tmp_path / "x.txt"
    write_text(target, "old")
    with pytest.raises(error), replacing(target) as beside:
        beside.write_text("half")
        raise error
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_folder_appears_complete_and_never_replaces_one_that_holds_files(tmp_path):
    target = tmp_path / "folder"
    with replacing(target) as beside:
        beside.mkdir()
        (beside / "x").write_text("first")
    with pytest.raises(OSError), replacing(target) as beside:
        beside.mkdir()
        (beside / "x").write_text("second")
    assert (target / "x").read_text() == "first" and list(tmp_path.iterdir()) == [target]


def test_files_have_the_permissions_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "x.json", {"a": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640
    assert read_json(tmp_path / "x.json") == {"a": 1}


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_what_is_no_json_object_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match="json is not"):
        read_json(tmp_path / "x.json")
