"""Files to go on from: dropped after quick errors, kept where there is something to lose."""

import pytest

from symmerge.aligning import jobs
from symmerge.errors import SymmergeError
from symmerge.matching.resume import ResumeFile


@pytest.fixture
def file(tmp_path):
    return ResumeFile(tmp_path / "out.partial.safetensors", {"task": 1})


def fail(file, error, *, before=False):
    if before:
        file.path.write_text("hours of work")
    with pytest.raises(type(error)), jobs.dropping_if_quick(file):
        file.path.write_text("some work")
        raise error


def test_a_quick_error_leaves_no_file(file):
    fail(file, SymmergeError("the disk is full"))
    assert not file.path.exists()


def test_long_work_is_kept(file, monkeypatch):
    monkeypatch.setattr(jobs, "WORTH_KEEPING", 0.0)
    fail(file, SymmergeError("the disk is full"))
    assert file.path.exists()


def test_ctrl_c_keeps_it(file):
    fail(file, KeyboardInterrupt())
    assert file.path.exists()


def test_the_file_of_an_earlier_run_is_never_removed(file):
    fail(file, SymmergeError("it was made with other options"), before=True)
    assert file.path.exists()


def test_without_a_file_the_error_passes():
    with pytest.raises(SymmergeError), jobs.dropping_if_quick(None):
        raise SymmergeError("no")
