"""Define verbs as functions of option groups: dataclasses whose fields are options.

`@verb()` expands the groups among a function's parameters into the signature that typer reads, and
rebuilds the groups when the command is called. Every verb also gets --config.
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
import yaml

from symmerge.checkpoints.limits import LARGEST_OPTIONS, read_plain
from symmerge.cli import console
from symmerge.errors import MismatchError
from symmerge.merging.mergekit_reading import is_mergekit

LARGEST_NUMBER = 10**18  # of an option in a file


def verb(
    interrupted: str = "interrupted: nothing was written",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a verb. Ctrl-C prints `interrupted`, which may name {options}."""

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
        return call

    return decorate


def _reflowed(text: str) -> str:
    """Join each paragraph into one line: help wraps to the terminal's width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _expanded(function: Callable[..., None], hints: dict[str, object]) -> Iterator[Parameter]:
    """The parameters of a function with each group replaced by its options, and --config."""
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            yield from _options(hint)
        else:
            yield _keyword(parameter.name, hint, parameter.default)
    yield _keyword("config", Config, None)


def _options(group: Any) -> Iterator[Parameter]:
    """A group's options; help shows them in its `panel`, if it has one."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        option = copy(option)
        option.rich_help_panel = getattr(group, "panel", None)
        default = Parameter.empty if field.default is MISSING else field.default
        yield _keyword(field.name, Annotated[kind, option], default)


def _keyword(name: str, annotation: object, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _configure(context: Any, file: Path | None) -> Path | None:
    """Options from a YAML file become the defaults; unknown ones are refused."""
    # Any, because typer passes its own context class, which is no typer.Context.
    if file is None:
        return None
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    with console.friendly():
        if is_mergekit(file):
            if context.info_name == "merge":  # the verb reads it
                return file
            raise MismatchError(f"{file} is a config of mergekit: symmerge merge --config reads it")
        options = _read_options(file)
        if unknown := sorted(options.keys() - known):
            raise MismatchError(
                f"{file}: unknown option {', '.join(unknown)};"
                f" {context.info_name} knows {', '.join(sorted(known))}"
            )
        for parameter in context.command.params:
            if parameter.name in options:
                _check_value(file, parameter, options[parameter.name])
    context.default_map = {**(context.default_map or {}), **options}
    return file


def _check_value(file: Path, parameter: Any, value: object) -> None:
    """Refuse values that cannot be what an option takes; the option itself checks the rest."""
    takes_many = parameter.nargs != 1 or getattr(parameter, "multiple", False)
    if takes_many != isinstance(value, list):
        kind = "a list" if takes_many else "one value, not a list"
        raise MismatchError(f"{file}: '{parameter.name}' must be {kind}")
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and abs(one) >= LARGEST_NUMBER:
            raise MismatchError(f"{file}: '{parameter.name}' has a number that is too large")


def _check_events(file: Path, text: str) -> None:
    """Refuse what options never need, before anything is built of it.

    A kilobyte of aliases can merge into gigabytes, and 5,000 brackets take half a minute.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise MismatchError(f"{file} has an alias (*name): write the value itself there")
        if depth > 2:
            raise MismatchError(f"{file} has lists in lists: write one option per line, 'seed: 1'")


def _read_options(file: Path) -> dict[str, object]:
    try:
        text = read_plain(file, LARGEST_OPTIONS).decode("utf-8")
        _check_events(file, text)
        content = yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MismatchError(
            f"{file} cannot be read as YAML ({reason}): write one option per line, 'seed: 1'"
        ) from error
    if not isinstance(content, dict):
        raise MismatchError(f"{file} holds no options: write one per line, 'seed: 1'")
    for name, value in content.items():
        values = value if isinstance(value, list) else [value]
        if not all(one is None or isinstance(one, str | int | float) for one in values):
            raise MismatchError(
                f"{file}: {name} is neither a value nor a list of values: write 'seed: 1'"
            )
    return {str(name).replace("-", "_"): value for name, value in content.items()}


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML file with any of these options.",
        callback=_configure,
        is_eager=True,
        show_default=False,
    ),
]
