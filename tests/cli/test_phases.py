"""What people see of a long job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import pickle
from io import StringIO

import pytest
from rich.console import Console

from symmerge.cli import console, phases
from symmerge.models.progress import Counted, Notice, Phase, reporter


@pytest.fixture
def terminal(monkeypatch):
    screen = StringIO()
    monkeypatch.setattr(
        console, "err", Console(file=screen, force_terminal=True, width=100, highlight=False)
    )
    yield screen
    console.phases.close()


@pytest.fixture
def short(monkeypatch):
    """A file, and a job that is over before its lines are worth reading."""
    screen = StringIO()
    monkeypatch.setattr(console, "err", Console(file=screen, width=100, highlight=False))
    yield screen
    console.phases.close()


@pytest.fixture
def file(short):
    """A file, and a job that takes long."""
    console.note(Notice("a long job"))
    console.phases._release()
    assert short.getvalue() == "a long job\n"
    short.truncate(0)
    short.seek(0)
    return short


def test_a_phase_draws_a_bar_with_the_time_left(terminal, monkeypatch):
    monkeypatch.setattr(phases, "WORTH_TELLING", 0.0)
    console.note(Phase("learning the symmetry"))
    console.note(Counted("step 1 of 4: held-out loss 3", 1, 4))
    console.note(Counted("step 2 of 4: held-out loss 3", 2, 4))
    console.phases._drawn.refresh()
    assert "learning the symmetry" in terminal.getvalue() and "left" in terminal.getvalue()
    assert "held-out loss" not in terminal.getvalue()  # a detail
    console.note(Phase("writing"))
    assert "learning the symmetry (0 s)" in terminal.getvalue()  # it stays as a line


def test_short_phases_leave_no_line_on_a_terminal(terminal):
    console.note(Phase("opening models"))
    console.phases.end()
    assert "opening models (" not in terminal.getvalue()


def test_elsewhere_a_short_job_prints_nothing(short):
    for line in (Notice("a minute"), Phase("matching weights"), Counted("step 1 of 2", 1, 2)):
        console.note(line)
    console.phases.close()
    assert short.getvalue() == ""


def test_elsewhere_lines_appear_after_three_seconds(short, monkeypatch):
    monkeypatch.setattr(phases, "PATIENCE", 0.05)
    console.note(Phase("matching weights"))
    assert short.getvalue() == ""
    console.phases._timer.join()
    console.note(Phase("writing"))
    assert short.getvalue() == "matching weights\nwriting\n"


def test_elsewhere_every_phase_is_a_plain_line(file):
    lines = (
        Notice("a minute"),
        Phase("matching weights"),
        "sweep 1: objective 2",
        Phase("writing"),
    )
    for line in lines:
        console.note(line)
    assert file.getvalue() == "a minute\nmatching weights\nwriting\n"


def test_elsewhere_a_long_phase_says_how_far_it_is(file, monkeypatch):
    console.note(Phase("learning"))
    console.note(Counted("step 1 of 9", 1, 9))
    assert file.getvalue() == "learning\n"  # the control: not at every step
    monkeypatch.setattr(phases, "SECONDS_BETWEEN", 0.0)
    console.note(Counted("step 2 of 9", 2, 9))
    assert file.getvalue() == "learning\n  learning: 2 of 9\n"


def test_details_are_lines_if_asked_for(file, monkeypatch):
    monkeypatch.setattr(console.phases, "verbose", True)
    console.note(Phase("matching weights"))
    console.note("sweep 1: objective 2")
    assert file.getvalue() == "matching weights\n  sweep 1: objective 2\n"


def test_items_are_counted(file, monkeypatch):
    monkeypatch.setattr(phases, "SECONDS_BETWEEN", 0.0)
    with console.progress("writing", 2) as tick:
        tick("a.weight")
        tick("b.weight")
    assert file.getvalue() == "writing\n  writing: 1 of 2\n  writing: 2 of 2\n"


def test_square_brackets_are_no_markup(file):
    console.note(Phase("aligning o[/x] to [bold]"))
    assert file.getvalue() == "aligning o[/x] to [bold]\n"


def test_phases_travel_between_processes():
    assert isinstance(pickle.loads(pickle.dumps(Phase("matching"))), Phase)


def test_progress_true_prints_and_none_does_not(capsys):
    reporter(True)(Phase("matching"))
    reporter(True)("sweep 1")
    assert capsys.readouterr().err == "matching\n  sweep 1\n"
    reporter(None)("matching")
    reporter(False)("matching")
    assert capsys.readouterr().err == ""
    lines = []
    reporter(lines.append)("matching")
    assert lines == ["matching"]
