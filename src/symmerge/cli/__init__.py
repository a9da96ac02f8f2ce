"""The command line: verbs, their options, and what they print. Work is done elsewhere."""

from __future__ import annotations

import os

# Before any verb runs: transformers and the hub read these when they are imported, torch when it first asks for memory.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault(
    "SYMMERGE_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "")
)  # what the user says about it
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # checkpoints are local folders; nothing is fetched but by hub.py, where a name is given
os.environ.setdefault(
    "THP_MEM_ALLOC_ENABLE", "1"
)  # torch: huge pages, which cost far less to get and give back

import typer

from symmerge.cli import experimenting, gathering, making, matching, measuring, spine

app = typer.Typer(
    help="Merge Transformers that were trained from different initialisations: find the symmetry between them, prove that it changes no function.",
    epilog="Exit codes: 0 yes or done, 1 no (verify), 2 a problem with the input; the message says what, where and the remedy.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which help shows them.
VERBS = (
    *(spine.inspect, spine.random, spine.apply, spine.canonical, spine.verify),
    *(matching.align, matching.merge, matching.same, gathering.statistics),
    *(measuring.barrier, measuring.report),
    *(making.train, making.demo, experimenting.experiment),
)
for verb in VERBS:
    app.command()(verb)


def main() -> None:
    """The entry point of the `symmerge` command."""
    app()


__all__ = ["app", "main"]
