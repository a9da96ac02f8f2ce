"""--config: options of a verb from a YAML file, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from symmerge.checkpoints.limits import LARGEST_OPTIONS, read_plain
from symmerge.cli import console
from symmerge.errors import MismatchError
from symmerge.merging.mergekit_reading import is_mergekit

LARGEST_NUMBER = 10**18  # of an option in a file
OTHERS = {"config", "help_all", "help"}  # parameters that no file sets


def _configure(context: Any, file: Path | None) -> Path | None:
    """Options from a file become the defaults; unknown ones are refused."""
    # Any, because typer passes its own context class, which is no typer.Context.
    if file is None:
        return None
    with console.friendly():
        if is_mergekit(file):
            if context.info_name == "merge":  # the verb reads it
                return file
            raise MismatchError(f"{file} is a mergekit config: use symmerge merge --config")
        named = _by_name(context.command.params)
        options = read_options(file)
        if unknown := sorted(options.keys() - named.keys()):
            raise MismatchError(
                f"{file}: unknown option {', '.join(unknown)}; {context.info_name} knows"
                f" {', '.join(sorted(name.replace('_', '-') for name in named))}"
            )
        for name, value in options.items():
            _check_value(file, name, named[name], value)
    defaults = {named[name].name: value for name, value in options.items()}
    context.default_map = {**(context.default_map or {}), **defaults}
    return file


def _by_name(parameters: list[Any]) -> Mapping[str, Any]:
    """Arguments by their names, options by the names they have on the command line."""
    named = {}
    for parameter in parameters:
        is_argument = parameter.param_type_name == "argument"
        for name in [parameter.name] if is_argument else parameter.opts:
            if len(name.lstrip("-")) > 1 or len(parameter.opts) == 1:  # not -o beside --out
                named[_plain(name)] = parameter
    return {name: parameter for name, parameter in named.items() if name not in OTHERS}


def _plain(name: object) -> str:
    return str(name).lstrip("-").replace("-", "_")


def read_options(file: Path) -> dict[str, object]:
    """The options of a file, dashes in their names as underscores; what is not one is refused."""
    content = _read_yaml(file)
    if not isinstance(content, dict):
        raise MismatchError(f"{file} has no options: write one per line, such as 'seed: 1'")
    for name, value in content.items():
        values = value if isinstance(value, list) else [value]
        if not all(one is None or isinstance(one, str | int | float) for one in values):
            raise MismatchError(
                f"{file}: {name} is neither a value nor a list of values: write it as 'seed: 1'"
            )
    return {_plain(name): value for name, value in content.items()}


def _read_yaml(file: Path) -> object:
    try:
        text = read_plain(file, LARGEST_OPTIONS).decode("utf-8")
        _check_events(file, text)
        return yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MismatchError(
            f"{file} cannot be read as YAML ({reason}): write one option per line, such as"
            " 'seed: 1'"
        ) from error


def _check_events(file: Path, text: str) -> None:
    """Refuse what options never need, before anything is built of it.

    A kilobyte of aliases can merge into gigabytes, and 5,000 brackets take half a minute.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise MismatchError(f"{file} has an alias (*name): write the value itself")
        if depth > 2:
            raise MismatchError(
                f"{file} has nested lists: write one option per line, such as 'seed: 1'"
            )


def _check_value(file: Path, name: str, parameter: Any, value: object) -> None:
    """Refuse values that cannot be what an option takes; the option itself checks the rest."""
    takes_many = parameter.nargs != 1 or getattr(parameter, "multiple", False)
    if takes_many != isinstance(value, list):
        kind = "a list" if takes_many else "one value, not a list"
        raise MismatchError(f"{file}: '{name}' must be {kind}")
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and abs(one) >= LARGEST_NUMBER:
            raise MismatchError(f"{file}: '{name}' has a number that is too large: correct it")


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML file with any arguments and options; merge also takes a mergekit config.",
        callback=_configure,
        is_eager=True,
        show_default=False,
        metavar="FILE",
    ),
]
