"""Write docs/architectures.md: what moves in every supported architecture, read off the code.

    python tools/architectures.py

The prose stays; the tables stand between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from symmerge.families import FAMILIES
from symmerge.families.left_out import REASONS
from symmerge.lab.small_models import EVERY, small_model
from symmerge.models.inspection import spaces
from symmerge.models.model import load
from symmerge.symmetry.groups import Group, RotaryPairs, ScaledPermutation, Trivial
from symmerge.symmetry.spec import Spec

DOCUMENT = Path(__file__).parents[1] / "docs" / "architectures.md"
ELSEWHERE = ("latent.q", "latent.kv", "rotary", "expert", "shared")  # not in every layer
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS: Mapping[str, str] = {
    "Trivial": "nothing",
    "Permutation": "permutations",
    "SignedPermutation": "permutations, signs",
    "Signs": "one sign per rotary pair",
    "Orthogonal": "rotations",
    "OrthogonalFixingOnes": "rotations that fix the ones vector",
    "GeneralLinear": "any change of basis",
}
PLACES: Mapping[str, str] = {
    "stream": "residual",
    "queries and keys": "qk.0",
    "values": "vo.0",
    "feed-forward": "ff.0",
}


def with_tables(document: str) -> str:
    """The document with its tables as the code is now."""
    tables = {
        "families": families_table,
        "left_out": left_out_table,
        "variants": variants_table,
    }
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", document)


def families_table() -> str:
    """One row per family: model types, stock classes and their tasks."""
    rows = [
        (
            family.name,
            ", ".join(f"`{kind}`" for kind in family.model_types),
            ", ".join(f"`{name}`" for name in family.classes),
            ", ".join(sorted({head.task for head in family.classes.values()})),
        )
        for family in FAMILIES
    ]
    return table(("family", "model_type", "class", "task"), rows)


def left_out_table() -> str:
    """One row per reason: the classes of supported model types that have no table."""
    rows = [(", ".join(f"`{name}`" for name in names), why) for why, names in REASONS.items()]
    return table(("class", "why it is left out"), rows)


def variants_table() -> str:
    """One row per small model of the tests: what each of its spaces may do."""
    rows = [row(name) for name in EVERY]
    header = ("model_type", "class", "settings", "task", *PLACES, "elsewhere", "spaces", "freedom")
    return table(header, list(dict.fromkeys(rows)))


def row(name: str) -> tuple[str, ...]:
    """The row of one small model."""
    architecture, config = EVERY[name]
    model = small_model(name)
    spec = load(model).spec
    places = [place(spec, name) for name in PLACES.values()]
    return (
        f"`{model.config.model_type}`",
        f"`{architecture}`",
        settings(config),
        spec.task,
        *places,
        elsewhere(spec),
        str(len(spec.hidden)),
        f"{sum(row['degrees of freedom'] for row in spaces(spec)):,}",
    )


def place(spec: Spec, name: str) -> str:
    """What a space of the first layer may do, in each stack or tower if they differ."""
    kind, dot, number = name.partition(".")
    pattern = re.compile(rf"{kind}(?:\.(?P<stack>[a-z]+\d*))?{re.escape(dot + number)}")
    found = [match for one in spec.spaces for match in [pattern.fullmatch(one)] if match]
    stacks = {match["stack"]: in_layers(spec, match[0]) for match in found}
    if len(set(stacks.values())) <= 1:
        return "".join([*stacks.values()][:1])
    return "; ".join(f"{stack}: {can}" for stack, can in stacks.items())


def in_layers(spec: Spec, name: str) -> str:
    """What a space of the first layer may do; in further layers it may differ."""
    layers = [name.replace("0", str(i)) for i in range(2)]
    kinds = [words(spec.spaces[one].group) for one in layers if one in spec.spaces]
    inside = ", in each expert" if (spec.spaces[name].per or "").startswith("expert") else ""
    return " / ".join(dict.fromkeys(kinds)) + inside


def words(group: Group) -> str:
    """A group in words: its class where it has none yet."""
    if isinstance(group, RotaryPairs):
        rest = ", any change of basis of the rest" if group.rotary < group.size else ""
        return f"one complex number per rotary pair{rest}"
    if isinstance(group, ScaledPermutation):
        return "permutations, " + ("positive scales" if group.positive else "scales")
    return WORDS.get(type(group).__name__, type(group).__name__)


def elsewhere(spec: Spec) -> str:
    """Hidden spaces outside the layers' usual places: pooler, classifier, embeddings."""
    others = [
        name for name in spec.hidden if not name[-1].isdigit() and not name.startswith("residual")
    ]
    for kind in ELSEWHERE:
        others += [name for name in spec.hidden if name.rpartition(".")[0] == kind][:1]
    parts = [f"{without_layer(name)}: {words(spec.spaces[name].group)}" for name in others]
    heads = spec.spaces.get("head.0")
    if heads and isinstance(heads.group, Trivial):
        parts.append("heads stay: each has a slope")
    return "; ".join(parts)


def without_layer(name: str) -> str:
    """The name of a space without the number of its layer."""
    return re.sub(r"\.\d+$", "", name)


def settings(config: Mapping[str, object]) -> str:
    """Settings of a variant that are not sizes, and how many heads share a key."""
    chosen = {
        key: value
        for key, value in config.items()
        if isinstance(value, bool | str | Mapping) or key == "num_key_value_heads"
        if not key.endswith("_config")
    }
    return ", ".join(f"`{key}={shown(value)}`" for key, value in chosen.items())


def shown(value: object) -> str:
    """A value; of a nested setting what matters for the groups."""
    if isinstance(value, Mapping) and "partial_rotary_factor" in value:
        return f"{value['partial_rotary_factor']:g} rotary"
    return str(value)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines: Iterator[str] = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    first, *rest = lines
    return "\n".join((first, "|" + "---|" * len(header), *rest))


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text("utf-8")), "utf-8")
    print(f"wrote {DOCUMENT.name}: {len(FAMILIES)} families, {len(EVERY)} variants")
