"""Print a verdict: a table, a few sentences, and what to do next or what to be warned of."""

from __future__ import annotations

from symmerge.cli import console
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.transporting.transport_results import TransportVerdict


def show_verdict(verdict: MergeVerdict | None) -> None:
    """The last lines of merge and align; a warning where the merge is no good."""
    if verdict is None:
        return
    _show_measured("How good is it?", verdict, "self-generated inputs")
    for command in verdict.next:
        console.say(f"next: {command}")
    if verdict.verdict == "poor":
        console.warn("this merge is far worse than its parents: do not use it as it is")


def show_arrival(verdict: TransportVerdict | None) -> None:
    """The last lines of transport; a warning where little arrived."""
    if verdict is None:
        return
    _show_measured("How much arrived?", verdict, "inputs that TUNED made")
    if verdict.verdict == "lost":
        console.warn("little arrived: try --effort best, or give --data")


def _show_measured(question: str, verdict: MergeVerdict | TransportVerdict, own: str) -> None:
    """The table of what was measured, `own` inputs or data, and the sentences."""
    task = verdict.task
    where = own if task.data == "self" else task.data
    console.show_table(f"{question} ({task.name} on {where})", verdict.table())
    for sentence in verdict.sentences:
        console.say(sentence)
