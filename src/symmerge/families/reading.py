"""What a config says about a table, and the table's lines for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from symmerge.symmetry.spec import Space


@dataclass(frozen=True)
class Reading:
    """What a config says: layers, spaces with their groups, and which lines of the table apply.

    A space whose name contains ``{i}`` exists once per layer; a model of several stacks says how
    many layers each has by its letter: ``{"i": encoder, "j": decoder}``. `only` are flags that hold
    in some layers alone, with their numbers. `same` maps a space to the
    one that replaces it under this config, or to a sum (``a + b``). `epsilon` is that of the norms.
    `reserved_positions` is how many learned ones come before the first token's, `gain_offset` what
    norms add to their weight.
    `encoded_as` is how a decoder by itself is given the output of an encoder.
    `pooled` and `task` are for classes without a head: how many coordinates of the pooled output
    are logits, and of which task. `end_token`, `noise` and `compared` are those of the table
    (`Spec`).
    """

    layers: int | Mapping[str, int]
    spaces: tuple[Space, ...]
    flags: Mapping[str, bool]
    only: Mapping[str, Collection[int]] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    epsilon: float = 0.0
    pooled: int | None = None
    task: str | None = None
    reserved_positions: int = 0
    end_token: int | None = None
    encoded_as: str | None = None
    noise: int = 0
    compared: tuple[str, ...] = ()
    gain_offset: float = 0.0

    def indices(self, text: str) -> Iterator[tuple[str, int]]:
        """Each layer of the stack whose letter a text contains, as (``{i}``, its number)."""
        stacks = self.layers if isinstance(self.layers, Mapping) else {"i": self.layers}
        letters = {f"{{{letter}}}": count for letter, count in stacks.items()}
        for letter in filter(text.__contains__, letters):
            yield from ((letter, number) for number in range(letters[letter]))


def expand(table: str, reading: Reading) -> Iterator[tuple[str, str]]:
    """The lines of a table that apply, as (first word, rest).

    An indented line continues the one above. ``{i}`` stands for every layer, ``{i+1}`` for every
    layer but the first, and ``if flag`` drops a line whose flag is not set. Letters of other stacks
    stand for theirs.
    """
    for line in filter(None, re.sub(r"\n[ \t]+", " ", table).splitlines()):
        line, _, flag = line.partition(" if ")
        flag = flag.strip()
        layers = reading.only.get(flag)
        if flag and layers is None and not reading.flags[flag]:
            continue
        every = re.sub(r"\{(\w)\+1\}", r"{\1}", line)
        name, rest = every.split(maxsplit=1)
        if "{" not in every:
            yield name, rest.strip()
        for letter, number in reading.indices(every):
            if (number or every == line) and (layers is None or number in layers):
                told = str(number)
                yield name.replace(letter, told), rest.replace(letter, told).strip()


def per_layer(space: Space, reading: Reading) -> Iterator[Space]:
    """A space for each layer, if its name has the place of a layer's number."""
    if "{" not in space.name:
        yield space
    for letter, number in reading.indices(space.name):
        per = space.per and space.per.replace(letter, str(number))
        yield replace(space, name=space.name.replace(letter, str(number)), per=per)


def with_spaces(axes: str, spaces: Mapping[str, str]) -> str:
    """Replace spaces in axes; each term of a replacing sum (``a + b``) gets the role of the old."""

    def renamed(match: re.Match[str]) -> str:
        space, role = match.groups()
        blocks = [f"{block}{role}" for block in spaces.get(space, space).split(" + ")]
        return blocks[0] if len(blocks) == 1 else f"({' + '.join(blocks)})"

    return re.sub(r"([A-Za-z_][\w.]*)([*~]?)", renamed, axes)
