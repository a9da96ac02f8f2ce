"""Print a verdict: a table, a few sentences, and what to do next."""

from __future__ import annotations

from symmerge.cli import console
from symmerge.merging.verdict_results import MergeVerdict


def show_verdict(verdict: MergeVerdict | None) -> None:
    """The last lines of merge and align; a warning where the merge is no good."""
    if verdict is None:
        return
    task = verdict.task
    where = "self-generated inputs" if task.data == "self" else task.data
    console.show_table(f"How good is it? ({task.name} on {where})", verdict.table())
    for sentence in verdict.sentences:
        console.say(sentence)
    for command in verdict.next:
        console.say(f"next: {command}")
    if verdict.verdict == "poor":
        console.warn("this merge is far worse than its parents: do not use it as it is")
