"""The command line: one module per verb, imported when the verb is called. No logic."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

# Before any verb is imported: transformers and the hub read these on import, torch when it first
# allocates memory.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("SYMMERGE_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))  # user's choice
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only checkpoints/hub.py downloads
# Threads that wait give their core away: beside other work ten steps took 70 s of learning, not 16.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: far cheaper to allocate and free

import typer
from typer.core import TyperCommand, TyperGroup

from symmerge import __version__

SETTINGS: dict[str, object] = {"help_option_names": ["-h", "--help"]}
# In the order of the help; a test checks that these are the first lines of the verbs' docstrings.
VERBS = {
    "merge": "Merge two or more models into one stock checkpoint of the original size.",
    "align": "Bring B into A's basin: OUT/reference and OUT/aligned compute what A and B do.",
    "evaluate": "Compare the loss and metrics of checkpoints and of their ensemble.",
    "barrier": "Measure the loss on the straight line between models, for one or more methods.",
    "report": "Make a self-contained page of results: curves with a slider, sortable tables.",
    "inspect": "Show a model's symmetries: spaces, groups, degrees of freedom, axes of tensors.",
    "derive": "Propose a symmetry table for an architecture, and prove every space in it.",
    "verify": "Do two checkpoints compute the same function? Exit code 0 for yes, 1 for no.",
    "same": "Are two checkpoints the same function up to symmetry? Exit code 0 for yes, 1 for no.",
    "kinship": "Are two checkpoints related, in any disguise? Exit code 0 for yes, 1 for no.",
    "random": "Write a random member of a model's symmetry orbit: new weights, the same function.",
    "apply": "Apply a saved alignment to a model: new weights, the same function.",
    "canonical": "Write a model in canonical form: gains folded, means removed, circuits balanced.",
    "statistics": "Gather activation statistics of two models once, to reuse in align and merge.",
    "transport": "Carry what a fine-tune or an adapter learned over to another base.",
    "demo": "Train two pairs of small models, align and merge them by every method, on one page.",
    "train": "Train a stock model: a small one in seconds on bundled data, or the papers' models.",
    "experiment": "Compute a paper's table, with the published numbers next to ours.",
}


class LazyVerbs(TyperGroup):
    """Verbs, listed from `VERBS` and imported only when called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command_for(name) if name and command else command, rest


def command_for(name: str) -> object:
    """The command of a verb; imports its module."""
    from symmerge.cli.options.groups import command_of

    return command_of(name, getattr(import_module(f"symmerge.cli.{name}"), name))


app = typer.Typer(
    cls=LazyVerbs,
    help="Merge Transformers that were trained from different initialisations: find the symmetry"
    " between them, and prove that it changes no function.",
    epilog="Help for a command: [bold]symmerge merge --help[/]; all of its options: --help-all.\n\n"
    "To complete commands and options with the Tab key, run [bold]symmerge --install-completion[/]"
    " and open a new shell.\n\n"
    "Exit codes: 0 yes or done, 1 no (verify, same, kinship), 2 a problem with the input;"
    " the message says what is wrong, where, and the remedy.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"symmerge {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _symmerge(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Callback of the app without a verb; typer shows the help instead."""


def main() -> None:
    """The entry point of the `symmerge` command."""
    from symmerge.cli.console import friendly, open_closed_streams, show_any_text

    open_closed_streams()
    show_any_text()
    with friendly():  # help that cannot be printed; verbs have their own
        app()


__all__ = ["app", "main"]
