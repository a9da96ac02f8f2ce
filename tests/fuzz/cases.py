"""One case: a target, what is done to its file, and a command. Kept as JSON when unclean."""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz.byte_mutators import mutate_bytes
from fuzz.damage import OUTSIDE, SECRET, Damage, Mutator
from fuzz.judge import Outcome, Snapshot, changes, judge, snapshot
from fuzz.sandbox import Ended
from fuzz.targets import TARGETS, Command, Target

SAID = ("stdout", "stderr", "memory")
COPIED = ("tokenizer", "special", "added", "preprocessor", "generation")  # as they are
SWAPPED = 0.05  # share of cases in which the file of another format takes the place


@dataclass(frozen=True)
class Case:
    """Enough to do it again on the same samples."""

    target: str
    damage: Damage
    command: Command

    def to_json(self) -> str:
        content = base64.b85encode(zlib.compress(self.damage.content)).decode()
        about = {"target": self.target, "what": self.damage.what, "kind": self.damage.kind}
        return json.dumps({**about, "command": self.command, "content": content}, indent=2)

    @staticmethod
    def from_json(text: str) -> Case:
        kept = json.loads(text)
        content = zlib.decompress(base64.b85decode(kept["content"]))
        damage = Damage(kept["what"], kept["kind"], content)
        return Case(kept["target"], damage, tuple(kept["command"]))

    @property
    def of(self) -> Target:
        return next(target for target in TARGETS if target.name == self.target)


def make_case(
    seed: int,
    number: int,
    samples: Path,
    targets: Sequence[Target] = TARGETS,
    commands: int | None = None,
) -> Case:
    """A case by its number: targets take turns, the rest is drawn.

    Of each target's commands only the first so many, which are the quick ones.
    """
    rng = random.Random(f"{seed} {number}")
    target = targets[number % len(targets)]
    content = (samples / target.sample / target.file).read_bytes()
    if rng.random() < SWAPPED:
        other = rng.choice(targets)
        damage = Damage(
            f"swap: {other.format}", content=(samples / other.sample / other.file).read_bytes()
        )
    else:
        damage = _damaged(rng, rng.choice(target.mutators), content)
    return Case(target.name, damage, rng.choice(target.commands[:commands]))


def _damaged(rng: random.Random, mutator: Mutator, content: bytes) -> Damage:
    """Not every draw makes a file: bytes are changed then."""
    try:
        return mutator(rng, content)
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError):
        return mutate_bytes(rng, content)


def prepare(case: Case, samples: Path, folder: Path) -> Snapshot:
    """A copy of the sample with the damage done, and a folder that nobody may touch."""
    shutil.copytree(samples / case.of.sample, folder / "box")
    for name in (OUTSIDE, "tmp", "home"):
        (folder / name).mkdir()
    (folder / OUTSIDE / SECRET).write_text("{}")
    case.damage.put(folder / "box" / case.of.file)
    return _seen(folder)


def act(case: Case) -> None:
    """The command, as a user gives it; without lines of progress, in which noise would hide."""
    from symmerge.cli import main, phases

    phases.PATIENCE = 1e6
    sys.argv = ["symmerge", *case.command]
    main()


def concluded(case: Case, folder: Path, before: Snapshot, ended: Ended) -> Outcome:
    """Judge what a child did with a case."""
    allowed = (*case.of.caches, *(case.of.writes if ended.code == 0 else ()))
    writes = tuple(f"box/{name}" for name in allowed)
    outcome = judge(ended, changes(before, _seen(folder)), writes, _codes(case))
    if outcome.kind in ("done", "no") and (wrong := _not_json(case, folder, ended)):
        return Outcome("bad json", said=wrong)
    return outcome


def _codes(case: Case) -> tuple[int, ...]:
    """Exit codes that can be right: two models of different seeds are never the same."""
    if case.command[0] not in ("verify", "same"):
        return (0, 2)
    return (0, 1, 2) if case.of.sample == "moved" else (1, 2)


def _not_json(case: Case, folder: Path, ended: Ended) -> str:
    """Which JSON of the answer other programs could not read: NaN is none."""
    texts = {"stdout": ended.out} if "--json" in case.command else {}
    out = folder / "box" / "out"
    files = [file for file in out.rglob("*.json") if not file.name.startswith(COPIED)]
    texts |= {file.name: file.read_text("utf-8") for file in files}
    for name, text in texts.items():
        try:
            json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            return f"{name}: {error}"
    return ""


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _seen(folder: Path) -> Snapshot:
    return {path: about for path, about in snapshot(folder).items() if path not in SAID}
