"""Define verbs as functions of option groups: dataclasses whose fields are options.

`@verb()` expands the groups among a function's parameters into the signature that typer reads, and
rebuilds the groups when the command is called. Options of a group with a `panel` are shown by
--help-all alone, but for those that it names as `main`; `panels` are those of single options.
Every verb also gets --config and --help-all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from symmerge.cli import console
from symmerge.cli.options.config import Config
from symmerge.cli.options.help import HelpAll, VerbCommand

ADDED = {"config": (Config, None), "help_all": (HelpAll, False)}
"""Options of every verb, and their defaults."""
VALUES = {int: "N", float: "X", Path: "PATH"}
"""Type -> what stands for a value in help, where an option says nothing better."""
HELP = {"help_option_names": ["--help", "-h"]}


def verb(
    interrupted: str = "interrupted: nothing was written", *, examples: tuple[str, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a verb. Ctrl-C prints `interrupted`, which may name {options}.

    Each of the `examples` is what follows `symmerge VERB`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

        @wraps(function)
        def call(**values: object) -> None:
            built = {
                name: group(**{field.name: values[field.name] for field in fields(group)})
                for name, group in groups.items()
            }
            own = inspect.signature(function).parameters.keys() - groups.keys()
            with console.friendly(interrupted.format(**values)):
                function(**built, **{name: values[name] for name in own})

        parameters = {parameter.name: parameter for parameter in _expanded(function, hints)}
        call.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        call.__doc__ = _reflowed(function.__doc__ or "")
        call.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        lines = (f"symmerge {function.__name__} {example}" for example in examples)
        call.examples = tuple(lines)  # type: ignore[attr-defined]
        return call

    return decorate


def command_of(name: str, function: Any) -> Any:
    """The command of a verb, for typer."""
    single = typer.Typer(
        add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    settings = {"cls": VerbCommand, "context_settings": HELP}
    single.command(name, epilog="\n".join(function.examples), **settings)(function)
    return typer.main.get_command(single)


def _reflowed(text: str) -> str:
    """Join each paragraph into one line: help wraps to the terminal's width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _expanded(function: Callable[..., None], hints: dict[str, object]) -> Iterator[Parameter]:
    """The parameters of a function with each group replaced by its options, and ours."""
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            yield from _options(hint)
        else:
            yield _keyword(parameter.name, hint, parameter.default)
    for name, (hint, default) in ADDED.items():
        yield _keyword(name, hint, default)


def _options(group: Any) -> Iterator[Parameter]:
    """A group's options, each with its panel, if it has one."""
    hints = get_type_hints(group, include_extras=True)
    panels = {**getattr(group, "panels", {}), **dict.fromkeys(getattr(group, "main", ()))}
    for field in fields(group):
        panel = panels.get(field.name, getattr(group, "panel", None))
        default = Parameter.empty if field.default is MISSING else field.default
        yield _keyword(field.name, hints[field.name], default, panel)


def _keyword(name: str, hint: Any, default: object, panel: str | None = None) -> Parameter:
    kind, option = get_args(hint)
    option = copy(option)
    option.rich_help_panel = option.rich_help_panel or panel
    values = (text for of, text in VALUES.items() if of in (kind, *get_args(kind)))
    option.metavar = option.metavar or next(values, None)
    annotation = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
