"""What a family is: a table in the notation, a reader of its config, and the names its checkpoints have had over the years."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Permutation,
    ScaledPermutation,
    SignedPermutation,
    Trivial,
)
from symmerge.symmetry.notation import Axes, atoms, parse
from symmerge.symmetry.spec import Norm, Scale, Space, Spec


@dataclass(frozen=True)
class Reading:
    """What a config says: how many layers, which spaces with which groups, and which optional lines of the table hold.

    A space whose name contains ``{i}`` exists once per layer. `same`: a space -> the one it is under this config, or several side by side (``a + b``).
    `epsilon`: that of the norms. `pooled` and `task` are for classes without a head: how many coordinates of what they pool count, and for what.
    """

    layers: int
    spaces: tuple[Space, ...]
    flags: Mapping[str, bool]
    same: Mapping[str, str] = field(default_factory=dict)
    epsilon: float = 0.0
    pooled: int | None = None
    task: str | None = None


@dataclass(frozen=True)
class Family:
    """One architecture and its close relatives.

    `table`: a line per tensor, ``name  axes  [if flag]``; ``{i}`` stands for every layer, ``{i+1}`` for every layer but the first.
    `norms`: a line per normalisation, ``norm -> reader reader``; ``norm <- writer -> reader`` for one that sits on the stream itself.
    `scales`: a line per gain that follows a map, ``gain <- map``.
    `architectures`: transformers class -> (task, a tensor only that class has, for configs that do not name their class).
    `ties`: stored nowhere when tied -> the tensor it shares. `tied_spaces`: a space -> the one it becomes while tied.
    `renames`: old names to today's. `buffers`: not weights, dropped.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: Mapping[str, tuple[str, str]]
    table: str
    norms: str
    read: Callable[[Any, Collection[str]], Reading]
    scales: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)
    tied_spaces: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = ()

    def rename(self, name: str) -> str:
        """Today's name of a tensor, whatever release wrote it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_buffer(self, name: str) -> bool:
        """Whether a stored tensor is a constant that today's classes compute themselves."""
        return any(re.search(pattern, name) for pattern in self.buffers)

    def architecture(self, declared: Iterable[str] | None, names: Collection[str]) -> str:
        """The transformers class: as the config declares it, else by the tensors there are."""
        declared = list(declared or [])
        known = [name for name in declared if name in self.architectures]
        if known:
            return known[0]
        supported = ", ".join(self.architectures)
        if declared:
            raise UnsupportedModel(
                f"{self.name}: {declared[0]} has no table here; supported classes: {supported}"
            )
        for architecture, (_, marker) in self.architectures.items():
            if marker in names:
                return architecture
        raise UnsupportedModel(
            f"{self.name}: the config names no class and no head was found among the tensors; supported: {supported}"
        )

    def bind(self, config: Any, names: Collection[str], architecture: str) -> Spec:
        """The table for one config."""
        reading = self.read(config, names)
        merged = {} if reading.flags.get("untied") else self.tied_spaces
        lines = dict(expand(self.table, reading))
        tensors = {
            name: parse(_replace(_replace(axes, merged), reading.same))
            for name, axes in lines.items()
        }
        tied = {
            atom.space for axes in lines.values() for atom in atoms(parse(axes))
        } & merged.keys()
        used = {atom.space for axes in tensors.values() for atom in atoms(axes)}
        spaces = {
            space.name: space
            for template in reading.spaces
            for space in _per_layer(template, reading.layers)
        }
        unknown = used - spaces.keys()
        assert not unknown, (
            f"{self.name}: the table uses spaces that the config reader does not make: {unknown}"
        )
        return Spec(
            family=self.name,
            architecture=architecture,
            task=reading.task or self.architectures[architecture][0],
            spaces={name: space for name, space in spaces.items() if name in used},
            tensors=tensors,
            norms=tuple(self._norms(reading, tensors)),
            scales=tuple(self._scales(reading, tensors)),
            ties={
                alias: target
                for alias, target in self.ties.items()
                if alias not in tensors and target in tensors and reading.flags.get("mlm", True)
            },
            joined=tuple(sorted({_replace(merged[space], reading.same) for space in tied})),
            pooled=reading.pooled,
        )

    def _norms(self, reading: Reading, tensors: Mapping[str, Any]) -> Iterator[Norm]:
        for norm, rest in expand(self.norms, reading):
            gain, shift = f"{norm}.weight", f"{norm}.bias"
            stream = _stream(tensors[gain])
            writer, _, readers = rest.rpartition("->")
            writer = writer.removeprefix("<-").strip() or None
            yield Norm(
                gain,
                shift if shift in tensors else None,
                stream,
                tuple(readers.split()),
                writer,
                reading.epsilon,
            )

    def _scales(self, reading: Reading, tensors: Mapping[str, Any]) -> Iterator[Scale]:
        for gain, writer in expand(self.scales, reading):
            yield Scale(gain, _stream(tensors[gain]), writer.removeprefix("<-").strip())


def expand(table: str, reading: Reading) -> Iterator[tuple[str, str]]:
    """The lines of a table that hold, once per layer where they say ``{i}``: (first word, the rest)."""
    for line in filter(None, (line.strip() for line in table.splitlines())):
        line, _, flag = line.partition(" if ")
        if flag and not reading.flags[flag.strip()]:
            continue
        first, line = int("{i+1}" in line), line.replace("{i+1}", "{i}")
        name, rest = line.split(maxsplit=1)
        layers = range(first, reading.layers) if "{i}" in line else (None,)
        for i in layers:
            yield name.replace("{i}", str(i)), rest.replace("{i}", str(i)).strip()


def _replace(axes: str, spaces: Mapping[str, str]) -> str:
    def named(match: re.Match[str]) -> str:
        parts = [f"{part}{match[2]}" for part in spaces.get(match[1], match[1]).split(" + ")]
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"

    return re.sub(r"([A-Za-z_][\w.]*)([*~]?)", named, axes)


def _stream(axes: Axes) -> str:
    """The space of a gain; what is shown of a stream comes first."""
    *_, last = atoms(axes)
    return last.space


def _per_layer(space: Space, layers: int) -> Iterator[Space]:
    if "{i}" not in space.name:
        yield space
        return
    for i in range(layers):
        per = space.per and space.per.replace("{i}", str(i))
        yield Space(space.name.replace("{i}", str(i)), space.group, per, space.translation)


def pair(size: Any) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def visible(**sizes: int) -> tuple[Space, ...]:
    """Spaces the outside sees."""
    return tuple(Space(name, Trivial(size)) for name, size in sizes.items())


def attention(*, heads: int, queries: int, qk: Group, vo: int | Group) -> tuple[Space, ...]:
    """The spaces of one attention layer: `heads` key-value heads, `queries` query heads to each, one basis per key-value head."""
    # Rotary positions turn a bias with the position; only without them is it the same for every key, or every value.
    return (
        Space("head.{i}", Permutation(heads)),
        Space("query.{i}", Permutation(queries), per="head.{i}"),
        Space("qk.{i}", qk, per="head.{i}", translation="drops"),
        Space(
            "vo.{i}",
            GeneralLinear(vo) if isinstance(vo, int) else vo,
            per="head.{i}",
            translation="passes",
        ),
    )


def feed_forward(activation: str, n: int) -> Group:
    """The group of a plain hidden layer: what commutes with its activation."""
    if activation in ("relu", "leaky_relu"):
        return ScaledPermutation(n, positive=True)
    if activation == "tanh":
        return SignedPermutation(n)
    if activation == "linear":
        return GeneralLinear(n)
    return Permutation(n)


def gated(n: int) -> Group:
    """The group of a gated hidden layer: the up branch is linear in every unit, so each may scale by anything but zero."""
    return ScaledPermutation(n, positive=False)
