"""What a family is: a table in the notation, a config reader, and names of past releases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from symmerge.errors import UnsupportedModel
from symmerge.families.parts import Fused, Part
from symmerge.families.reading import Reading, expand, per_layer, with_spaces
from symmerge.symmetry.groups import (
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    Trivial,
)
from symmerge.symmetry.notation import Axes, atoms, parse
from symmerge.symmetry.spec import Constant, Norm, Scale, Space, Spec


class Head(NamedTuple):
    """The task of a transformers class, and a tensor that only this class has."""

    task: str
    marker: str


@dataclass(frozen=True)
class Family:
    """One architecture and its close relatives. docs/new-family.md shows how to write one.

    | field | contents |
    |---|---|
    | `architectures` | transformers class -> its head |
    | `table` | a line per tensor: ``name  axes  [if flag]`` |
    | `norms` | a line per norm: ``norm -> readers``, ``norm <- writer -> readers``, ``padded ->`` |
    | `scales` | a line per gain that follows a linear map: ``gain <- map`` |
    | `sums` | a line per LayerNorm on the stream itself: ``norm <- maps it alone reads`` |
    | `constants` | a line per parameter in an input's place: ``parameter -> map space it writes`` |
    | `ties` | tensor that is not stored when tied -> the tensor it shares |
    | `tied_spaces` | space -> the one it becomes while tied |
    | `renames` | patterns of old tensor names -> today's |
    | `buffers` | patterns of stored tensors that are not weights |
    | `unread` | patterns of stored tensors that no class reads, unless the table has them |
    | `parts` | tensors that files hold in parts, as experts one by one, or fused |
    | `copies` | names under which a class has a tensor again, always the same |
    | `explicit` | settings that transformers reads off others, and that configs leave out |
    | `variants` | the same for further classes: without heads, or with other names of modules |
    | `stripped` | of classes without heads: the prefix that tensors have in those with a head |
    """

    name: str
    model_types: tuple[str, ...]
    architectures: Mapping[str, Head]
    table: str
    norms: str
    read: Callable[[Any, Collection[str]], Reading]
    scales: str = ""
    sums: str = ""
    constants: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)
    tied_spaces: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    parts: tuple[Part | Fused, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    explicit: tuple[str, ...] = ()
    variants: tuple[Family, ...] = ()
    stripped: str = ""

    def of(self, declared: object) -> Family:
        """The variant whose class the config declares, else the family itself."""
        first = declared[0] if isinstance(declared, list) and declared else None
        variants = (one for one in self.variants if first in tuple(one.architectures))
        return next(variants, self)

    @property
    def classes(self) -> dict[str, Head]:
        """Every class, those of the variants as well."""
        variants = (one.architectures for one in self.variants)
        return {
            **self.architectures,
            **{name: head for one in variants for name, head in one.items()},
        }

    def rename(self, name: str) -> str:
        """The current name of a tensor, whichever transformers release or class wrote it."""
        name = self.stripped + name.removeprefix(self.stripped)
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name.removeprefix(self.stripped)

    def is_buffer(self, name: str) -> bool:
        """Whether a stored tensor is a constant that current classes compute themselves."""
        return any(re.search(pattern, name) for pattern in self.buffers)

    def architecture(self, declared: Iterable[str] | None, names: Collection[str]) -> str:
        """The transformers class: declared by the config, else inferred from tensor names."""
        declared = list(declared or [])
        known = [name for name in declared if name in self.architectures]
        if known:
            return known[0]
        supported = f"supported classes: {', '.join(self.classes)}"
        if declared:
            raise UnsupportedModel(f"{self.name}: no table for {declared[0]}; {supported}")
        for architecture, head in self.architectures.items():
            if head.marker in names:
                return architecture
        raise UnsupportedModel(
            f"{self.name}: no tensor tells the class: add it to config.json; {supported}"
        )

    def bind(self, config: Any, names: Collection[str], architecture: str) -> Spec:
        """The table for one config."""
        reading = self.read(config, names)
        tied_spaces = {} if reading.flags.get("untied") else self.tied_spaces
        lines = dict(expand(self.table, reading))
        tensors = {
            name: parse(with_spaces(with_spaces(axes, tied_spaces), reading.same))
            for name, axes in lines.items()
        }
        joined = _spaces(map(parse, lines.values())) & tied_spaces.keys()
        return Spec(
            family=self.name,
            architecture=architecture,
            task=reading.task or self.architectures[architecture].task,
            spaces=self._used_spaces(reading, tensors),
            tensors=tensors,
            norms=tuple(self._norms(reading, tensors)),
            scales=tuple(self._scales(reading, tensors)),
            ties=self._ties(reading, tensors),
            copies=self.copies,
            joined=tuple(
                sorted({with_spaces(tied_spaces[space], reading.same) for space in joined})
            ),
            summed=tuple(self._summed(reading, tensors)),
            pooled=reading.pooled,
            reserved_positions=reading.reserved_positions,
            encoded_as=reading.encoded_as,
            end_token=reading.end_token,
            noise=reading.noise,
            compared=reading.compared,
            constants=tuple(self._constants(reading)),
            gain_offset=reading.gain_offset,
        )

    def _used_spaces(self, reading: Reading, tensors: Mapping[str, Axes]) -> dict[str, Space]:
        used = _spaces(tensors.values())
        spaces = [space for each in reading.spaces for space in per_layer(each, reading)]
        unknown = used - {space.name for space in spaces}
        assert not unknown, f"{self.name}: the config reader makes no space {unknown}"
        return {space.name: space for space in spaces if space.name in used}

    def _ties(self, reading: Reading, tensors: Mapping[str, Axes]) -> dict[str, str]:
        headless = not all(reading.flags.get(head, True) for head in ("mlm", "lm"))
        return {
            alias: target
            for alias, target in self.ties.items()
            if alias not in tensors
            and target in tensors
            # two stacks share their embedding whatever head there is
            and (alias.endswith("embed_tokens.weight") or not headless)
        }

    def _norms(self, reading: Reading, tensors: Mapping[str, Axes]) -> Iterator[Norm]:
        lines: dict[str, str] = {}
        for norm, rest in expand(self.norms, reading):
            # One that all layers of another stack read has a line for each of them.
            lines[norm] = f"{lines[norm]} {rest.partition('->')[2]}" if norm in lines else rest
        for norm, rest in lines.items():
            writer, _, readers = rest.rpartition("->")
            padded = writer.strip() == "padded"
            gain, shift = f"{norm}.weight", f"{norm}.bias"
            yield Norm(
                gain=gain,
                shift=shift if shift in tensors else None,
                stream=_stream(tensors[gain]),
                readers=tuple(readers.split()),
                writer=None if padded else writer.removeprefix("<-").strip() or None,
                epsilon=reading.epsilon,
                padded=padded,
            )

    def _summed(self, reading: Reading, tensors: Mapping[str, Axes]) -> Iterator[str]:
        for _, maps in expand(self.sums, reading):
            for name in maps.removeprefix("<-").split():
                named = (name, f"{name}.weight", f"{name}.bias")
                yield from (tensor for tensor in named if tensor in tensors)

    def _constants(self, reading: Reading) -> Iterator[Constant]:
        for parameter, rest in expand(self.constants, reading):
            reader, space = rest.removeprefix("->").split()
            yield Constant(parameter, reader, space)

    def _scales(self, reading: Reading, tensors: Mapping[str, Axes]) -> Iterator[Scale]:
        for gain, writer in expand(self.scales, reading):
            yield Scale(gain, _stream(tensors[gain]), writer.removeprefix("<-").strip())


def with_bare(family: Family, prefix: str, task: str, classes: Iterable[str]) -> Family:
    """The family, and with it the classes without a head, whose tensors have no prefix."""

    def read(config: Any, names: Collection[str]) -> Reading:
        reading = family.read(config, names)
        return replace(reading, spaces=tuple(map(_unfolded, reading.spaces)))

    bare = replace(
        family,
        architectures=dict.fromkeys(classes, Head(task, "")),
        table=_stripped(family.table, prefix),
        sums=_stripped(family.sums, prefix),
        norms="",  # the gain before a visible output is visible as well
        scales="",
        ties={
            alias.removeprefix(prefix): target.removeprefix(prefix)
            for alias, target in family.ties.items()
            if prefix and alias.startswith(prefix)
        },
        tied_spaces={},
        read=read,
        variants=(),
        stripped=prefix,
    )
    return replace(family, variants=(*family.variants, bare))


def with_names(family: Family, old: str, new: str, classes: Mapping[str, Head]) -> Family:
    """The family, and with it classes whose tensors are called `new` where others' are `old`.

    Patterns, as in `re.sub`; they are of the table, and hold at the beginning of a tensor's name.
    """

    def called(text: str) -> str:
        return re.sub(rf"(?<![\w.])(?:{old})", new, text)

    variant = replace(
        family,
        architectures={
            name: head._replace(marker=called(head.marker)) for name, head in classes.items()
        },
        table=called(family.table),
        norms=called(family.norms),
        scales=called(family.scales),
        sums=called(family.sums),
        constants=called(family.constants),
        ties={
            called(alias): called(target)
            for alias, target in family.ties.items()
            if called(alias) != called(target)
        },
        copies={called(copy): called(target) for copy, target in family.copies.items()},
        variants=(),
    )
    return replace(family, variants=(*family.variants, variant))


def _unfolded(space: Space) -> Space:
    """A visible stream stays; what could only rotate once gains are folded is permuted."""
    if space.name.partition(".")[0] == "residual":
        return replace(space, group=Trivial(space.group.size))
    rotates = isinstance(space.group, Orthogonal | OrthogonalFixingOnes)
    return replace(space, group=Permutation(space.group.size)) if rotates else space


def _stripped(table: str, prefix: str) -> str:
    """The lines of tensors with this prefix, without it."""
    lines = re.sub(r"\n[ \t]+", " ", table).splitlines()
    return "\n".join(line for line in lines if line.startswith(prefix)).replace(prefix, "")


def _spaces(tensors: Iterable[Axes]) -> set[str]:
    return {atom.space for axes in tensors for atom in atoms(axes)}


def _stream(axes: Axes) -> str:
    """The space of a gain: the last one, because visible coordinates of a stream come first."""
    *_, last = atoms(axes)
    return last.space


def pair(size: Any) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def check_last_token(config: Any) -> None:
    """Refuse a classifier by the last token that cannot tell padding from it."""
    padding = config.pad_token_id
    if padding is None or not 0 <= padding < config.vocab_size:
        raise UnsupportedModel(
            f"{config.architectures[0]} reads one sequence at a time without a padding token:"
            " set 'pad_token_id' in config.json to a token of its vocabulary"
        )
