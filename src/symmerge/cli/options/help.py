"""The help of a verb: its main options; those in panels follow with --help-all."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from typer.core import TyperCommand

from symmerge.cli import console

MAIN = "Options"
"""The panel of options that name none: what --help shows."""
FULL = "symmerge.full-help"


class VerbCommand(TyperCommand):
    """A verb, with help in two lengths."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help: main options, or after --help-all every panel."""
        show_help(self, ctx)


def _show_all(context: Any, asked: bool) -> bool:
    # Any, because typer passes its own context class, which is no typer.Context.
    if asked:
        context.meta[FULL] = True
        context.command.format_help(context, None)
        raise typer.Exit
    return asked


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", help="Show every option and exit.", callback=_show_all, is_eager=True
    ),
]


def show_help(command: TyperCommand, context: Any) -> None:
    """Print usage, what the verb is for, options in panels, and examples."""
    panels = _panels(command, context)
    say, arguments = console.out.print, panels.pop("", [])
    words = [_called(argument) for argument in arguments]
    usage = " ".join([context.command_path.replace("python -m ", ""), *words, "[OPTIONS]"])
    say(Padding(f"[bold]Usage:[/] {escape(usage)}", (1, 1, 1, 1)))
    say(Padding(command.help or "", (0, 1, 1, 1)))
    if arguments:
        say(_panel("Arguments", arguments))
    further = sum(len(options) for name, options in panels.items() if name != MAIN)
    for name, options in panels.items():
        if name == MAIN or context.meta.get(FULL):
            say(_panel(name, options))
    _show_end(command, context, further)


def _show_end(command: TyperCommand, context: Any, further: int) -> None:
    if further and not context.meta.get(FULL):
        more = f"{further} more options: symmerge {context.info_name} --help-all"
        console.out.print(Padding(more, (0, 1)))
    if command.epilog:
        examples = "\n".join(f"  {line}" for line in command.epilog.splitlines())
        console.out.print(Padding("[bold]Examples:[/]", (1, 1, 0, 1)))
        console.out.print(Padding(escape(examples), (0, 1, 1, 1)))


def _panels(command: TyperCommand, context: Any) -> dict[str, list[Any]]:
    """Visible parameters by panel, the main one first; arguments under no name."""
    panels: dict[str, list[Any]] = defaultdict(list, {MAIN: []})
    for parameter in command.get_params(context):
        if not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None) or MAIN
            panels["" if parameter.param_type_name == "argument" else panel].append(parameter)
    if len(panels) - ("" in panels) == 1:  # --help-all would show nothing new
        panels[MAIN] = [option for option in panels[MAIN] if option.name != "help_all"]
    return panels


def _panel(title: str, parameters: list[Any]) -> Panel:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    for parameter in parameters:
        table.add_row(escape(_called(parameter)), escape(_explained(parameter)))
    return Panel(table, title=title, title_align="left", border_style="dim")


def _called(parameter: Any) -> str:
    """How it is written: --out, -o DIR."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'TEXT'}"


def _explained(parameter: Any) -> str:
    """Its help, and what it is where nothing is given."""
    shown, default = parameter.show_default, parameter.default
    if parameter.param_type_name == "argument" or parameter.required or not shown:
        usual = ""
    elif isinstance(shown, str):
        usual = shown
    else:
        usual = "" if default is None or parameter.is_flag else str(default)
    notes = [f"default: {usual}"] if usual else []
    notes += ["required"] if parameter.required else []
    notes += [f"or ${parameter.envvar}"] if getattr(parameter, "envvar", None) else []
    return f"{parameter.help or ''} [{'; '.join(notes)}]" if notes else parameter.help or ""
