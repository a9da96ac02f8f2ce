"""Hooks of mkdocs: pages from outside docs/, links out of docs/, options of every command.

Documents link to one another as they lie in the repository, so that they also work where they are
read as files. On the site, documents of the root are pages under project/, and other linked files
(results as JSON) are copied to repository/.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).parents[1]
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
COMMANDS, OTHERS = "<!-- commands -->", "<!-- others -->"
# What the theme would fetch for search from the disk -> ours: reading needs no network.
FETCHED, OWN = "https://unpkg.com/iframe-worker/shim", "assets/search-worker.js"
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=.?https?://[^>]*>")


def on_files(files: Files, config: Any, **_: object) -> Files:
    """Add the documents of the root, and every file outside docs/ that a page links to."""
    for name in PROJECT:
        files.append(generated(config, f"project/{name}", ROOT / name))
    for place in sorted(linked_files(files)):
        files.append(generated(config, f"repository/{place}", ROOT / place))
    return files


def generated(config: Any, uri: str, source: Path) -> File:
    """A file of the site that lies outside docs/."""
    return File.generated(config, uri, content=source.read_bytes())


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Rewrite links that leave docs/; list what the code knows: options, public names."""
    uri = page.file.src_uri
    text = LINK.sub(lambda link: f"{link[1]}{site_link(uri, link[2])}{link[3]}", markdown)
    if COMMANDS in text:
        return text.replace(COMMANDS, "\n".join(all_options()))
    return text.replace(OTHERS, "\n".join(other_names(text))) if OTHERS in text else text


def on_post_page(output: str, page: Any, **_: object) -> str:
    """Nothing is loaded from elsewhere: replace the theme's script, refuse anything else."""
    local = os.path.relpath(OWN, PurePosixPath(page.url).parent)
    text = output.replace(FETCHED, local)
    if elsewhere := ELSEWHERE.findall(text):
        log.warning("%s loads from elsewhere: %s", page.url, ", ".join(elsewhere))
    return text


def on_post_template(output_content: str, template_name: str, **_: object) -> str:
    """The page for what is not found, too."""
    return output_content.replace(FETCHED, OWN)


def in_repository(uri: str) -> PurePosixPath:
    """Where the source of a page lies in the repository."""
    own = PurePosixPath(uri)
    return PurePosixPath(own.name) if own.parts[0] == "project" else "docs" / own


def target(uri: str, link: str) -> str:
    """What a link of a page points to, as a path in the repository."""
    return os.path.normpath(in_repository(uri).parent / link)


def site_link(uri: str, link: str) -> str:
    """The same link on the site."""
    place = target(uri, link)
    if place.startswith("docs/"):
        there = place.removeprefix("docs/")
    elif place == "README.md":
        there = "index.md"
    else:
        there = f"project/{place}" if place in PROJECT else f"repository/{place}"
    return os.path.relpath(there, PurePosixPath(uri).parent)


def linked_files(files: Files) -> Iterator[str]:
    """Files outside docs/ that pages link to, once each."""
    found: set[str] = set()
    for file in files.documentation_pages():
        links = LINK.findall(file.content_string)
        found |= {target(file.src_uri, link) for _, link, _ in links}
    outside = (place for place in found if not place.startswith(("docs/", "..")))
    yield from (one for one in outside if one not in PROJECT and (ROOT / one).is_file())


def other_names(page: str) -> Iterator[str]:
    """Public names that the reference has no place for yet."""
    import symmerge

    listed = {*re.findall(r"^::: symmerge\.(\w+)", page, re.M)}
    if others := [name for name in symmerge.__all__ if name not in listed]:
        yield "## Further"
        yield from (f"::: symmerge.{name}" for name in others)


def all_options() -> Iterator[str]:
    """The options of every verb, as tables."""
    from symmerge.cli import VERBS, command_for

    yield "## All options"
    for name, about in VERBS.items():
        yield f"\n### symmerge {name}\n{plain(about)}\n"
        yield "| option | default | meaning |\n|---|---|---|"
        yield from map(option_row, getattr(command_for(name), "params"))  # noqa: B009


def option_row(option: Any) -> str:
    """A row of the table of options."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.param_type_name == "argument":
        names = f"`{option.metavar or option.name}`"
    return f"| {names} | {default(option)} | {plain(option.help or '')} |"


def default(option: Any) -> str:
    """The default as the help shows it."""
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    if option.required:
        return "required"
    return "" if shown in (None, False, "", ()) or callable(shown) else f"`{shown}`"


def plain(text: str) -> str:
    """Help without the markup of a terminal, fit for a table."""
    return re.sub(r"\[/?(bold|dim|italic)?\]", "", " ".join(text.split())).replace("|", "\\|")
