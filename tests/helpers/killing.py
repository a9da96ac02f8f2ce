"""Run a verb, kill it with -9 at some moment, run it again, compare every byte.

`killed_verbs.py` says which verbs, and is the program. Runs are forked from one process that has
imported everything, so that one costs a fraction of a second.
"""

import ctypes
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

SECONDS = 90  # no run of these takes so long: it hangs
LONGEST_WRITE = 0.004  # aimed kills come at most so long after an event
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.symlink")
# Wall-clock times and process numbers differ from run to run. Nothing else is left out.
TIMED_FIELDS = {
    "solution.json": ("seconds",),
    "universe.json": ("seconds",),
    "metrics.json": ("seconds",),
}
TIMED_FILES = ("times.jsonl",)
TIMED_TEXT = {"page.html": rb"The search took \d+ sweeps in [\d.]+ s"}


@dataclass(frozen=True)
class Verb:
    """A command to kill. `whole`: patterns of what must be complete wherever it is there.

    `before` prepares the empty folder; `older`: what lies at the target, to be overwritten;
    `long`: for `make kills` alone.
    """

    label: str
    arguments: tuple[object, ...]
    whole: tuple[str, ...] = ("out",)
    again: tuple[str, ...] = ()
    overwrites: bool = True
    before: Callable[[], object] | None = None
    older: Path | None = None
    long: bool = False
    run: Callable[[list[str]], None] | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code (None: killed), its writes, its seconds."""

    code: int | None
    events: int
    seconds: float


@dataclass
class Outcome:
    """What was seen of one verb."""

    label: str
    moments: Counter = field(default_factory=Counter)
    identical: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self):
        return sum(self.moments.values())


@dataclass(frozen=True)
class Moment:
    """When to kill: after some seconds, or some seconds after the n-th write."""

    seconds: float
    event: int = 0


class Place:
    """Folders of the runs: `work` is emptied before each, the others must not change."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "work"
        for name in ("inputs", "home", "tmp", "cwd", "cache", "work"):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        os.environ.update(HOME=str(root / "home"), TMPDIR=str(root / "tmp"))
        os.environ.update(SYMMERGE_CACHE=str(root / "cache"))

    def clear(self, verb: Verb) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        if verb.before:
            verb.before()
        if verb.older:
            shutil.copytree(verb.older, self.work / "out")

    def others(self):
        """Everything beside `work`: times of change and sizes."""
        beside = [path for path in self.root.iterdir() if path not in (self.work, self.log)]
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for folder in beside
            for path in (folder, *folder.rglob("*"))
        }

    @property
    def log(self):
        return self.root / "said.txt"


def contents(folder: Path) -> dict[str, str]:
    """Everything below a folder, hashed without the fields that hold times."""
    return {
        path.relative_to(folder).as_posix(): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in TIMED_FILES
    }


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "folder"
    data = path.read_bytes()
    if timed := TIMED_FIELDS.get(path.name):
        known = {key: value for key, value in json.loads(data).items() if key not in timed}
        data = json.dumps(known).encode()
    if text := TIMED_TEXT.get(path.name):
        data = re.sub(text, b"", data)
    return sha256(data).hexdigest()


def run_forked(verb: Verb, options: tuple, place: Place, moment: Moment | None = None) -> Ended:
    """Run a verb in a child; kill it at the moment, and wait for all that it started."""
    shared, (told, tell) = mmap.mmap(-1, 8), os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(told)
        _child(verb, options, place, _Watch(place.work, shared, moment, tell))
    os.close(tell)
    if moment:
        _wait_for(moment, told)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    seconds = time.perf_counter() - start
    os.close(told)
    _end_of_group(child)
    code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return Ended(code, struct.unpack("q", shared)[0], seconds)


def _wait_for(moment: Moment, told: int) -> None:
    if moment.event:
        os.read(told, 1)  # comes at the event, or at the end of the run
    time.sleep(moment.seconds)


def _child(verb: Verb, options: tuple, place: Place, watch: "_Watch") -> None:
    code = 1
    try:
        os.setsid()
        signal.alarm(SECONDS)
        os.chdir(place.root / "cwd")
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        sys.addaudithook(watch)
        (verb.run or _command)([*map(str, verb.arguments), *options])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _command(arguments: list[str]) -> None:
    from symmerge.cli import app

    app(arguments)


class _Watch:
    """An audit hook that counts changes of files, and says or kills at one of them.

    It is called before the change. Workers of a run have it, too; the run itself is killed.
    """

    def __init__(self, work: Path, shared: mmap.mmap, moment: Moment | None, tell: int) -> None:
        self.work, self.shared, self.main = str(work), shared, 0
        self.at, self.exact = (moment.event, not moment.seconds) if moment else (0, False)
        self.tell = tell

    def __call__(self, event: str, arguments: tuple) -> None:
        self.main = self.main or os.getpid()
        if not self._changes(event, arguments):
            return
        count = struct.unpack("q", self.shared)[0] + 1
        if count == self.at and self.exact:
            os.kill(self.main, signal.SIGKILL)
        self.shared[:] = struct.pack("q", count)
        if count == self.at:
            os.write(self.tell, b".")

    def _changes(self, event: str, arguments: tuple) -> bool:
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not (writes or event in CHANGES) or not isinstance(arguments[0], str | os.PathLike):
            return False
        return os.fspath(arguments[0]).startswith(self.work)


def _end_of_group(leader: int) -> None:
    """Wait until everything that a run started has ended; we are their reaper."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            os.waitpid(-leader, os.WNOHANG)
            os.killpg(leader, 0)
        except ChildProcessError:
            return
        except ProcessLookupError:
            return
        time.sleep(0.005)
    os.killpg(leader, signal.SIGKILL)
    raise TimeoutError(f"processes of run {leader} did not end with it")


def adopt_orphans() -> None:
    """Workers whose run was killed become our children: we can wait for them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def moments(kills: int, reference: Ended, dice: random.Random) -> list[Moment]:
    """Half at any time, a quarter exactly at a write, a quarter shortly after one."""
    found = []
    for turn in range(kills):
        event = dice.randint(1, reference.events)
        found.append(
            (
                Moment(dice.uniform(0, reference.seconds)),
                Moment(0.0, event),
                Moment(dice.uniform(0, reference.seconds)),
                Moment(dice.uniform(0, LONGEST_WRITE), event),
            )[turn % 4]
        )
    return found


def kill_many(verb: Verb, place: Place, kills: int, *, seed: int = 0, quick: bool) -> Outcome:
    """Kill a verb so many times; every time run it again and compare with an undisturbed run."""
    outcome, dice = Outcome(verb.label), random.Random(f"{verb.label} {seed}")
    references = []
    for _ in range(1 if quick else 2):  # the first may fill a cache, and take longer
        place.clear(verb)
        reference = run_forked(verb, (), place)
        references.append(contents(place.work))
        if reference.code != 0:
            outcome.problems.append(f"does not run: {place.log.read_text()[-500:]}")
            return outcome
    expected, others = references[-1], place.others()
    if unlike := [name for name, _ in references[0].items() ^ expected.items()]:
        outcome.problems.append(f"two undisturbed runs differ: {sorted(set(unlike))}")
    left = 3 * kills  # some runs are faster than their moment
    while outcome.kills < kills and left and len(outcome.problems) < 5:
        for moment in moments(min(left, kills - outcome.kills), reference, dice):
            left -= 1
            place.clear(verb)
            ended = run_forked(verb, (), place, moment)
            if ended.code is None:
                again = Moment(dice.uniform(0, reference.seconds)) if left % 3 == 0 else None
                _judge(verb, place, ended, expected, others, outcome, moment, again)
    return outcome


def _judge(verb, place, ended, expected, others, outcome, moment, again) -> None:
    """What lies there after a kill (with `again`: after two), and after the last run."""
    problems: list[str] = []
    there = complete(verb, place.work, expected, problems)
    when = "before" if not ended.events else "after" if there else "during"
    outcome.moments[when] += 1
    options = (*verb.again, *(("--overwrite",) if there and verb.overwrites else ()))
    left = sorted(contents(place.work).keys() - expected.keys())
    if again:
        run_forked(verb, options, place, again)
        there = complete(verb, place.work, expected, problems)
        options = (*verb.again, *(("--overwrite",) if there and verb.overwrites else ()))
    second = run_forked(verb, options, place)
    found = contents(place.work)
    if second.code != 0:
        problems.append(f"the second run failed: {place.log.read_text()[-300:]}")
    problems += [f"stays behind: {name}" for name in found.keys() - expected.keys()]
    problems += [f"is missing: {name}" for name in expected.keys() - found.keys()]
    both = found.keys() & expected.keys()
    problems += [f"differs: {name}" for name in both if found[name] != expected[name]]
    if (now := place.others()) != others:
        changed = {name for name, _ in now.items() ^ others.items()}
        problems.append(f"touched beside the output: {sorted(changed)[:3]}")
    outcome.identical += not problems
    which = f"{moment}, {again or 'once'} ({when}; left {left[:3]})"
    outcome.problems += [f"{which}: {problem}" for problem in problems]


def complete(verb: Verb, work: Path, expected: dict, problems: list[str]) -> bool:
    """Whether the whole output is there; adds what is there and not complete."""
    found, there = contents(work), True
    older = {f"out/{name}": one for name, one in contents(verb.older).items()} if verb.older else {}
    units = [name for name in expected if any(_matches(name, one) for one in verb.whole)]
    assert units, f"{verb.label} writes none of {verb.whole}"
    for unit in units:
        now, then = _below(found, unit), _below(expected, unit)
        there = there and unit in found and now == then
        if unit in found and now != then and not (older and now == older):
            wrong = sorted(name for name, _ in now.items() ^ then.items())
            problems.append(f"{unit} is there and not complete: {wrong[:3]}")
    return there


def _matches(name: str, pattern: str) -> bool:
    return Path("/", name).match(f"/{pattern}")


def _below(tree: dict, unit: str) -> dict:
    """The file of this name, or what is in the folder."""
    inside = {name: one for name, one in tree.items() if name.startswith(f"{unit}/")}
    return inside or {unit: tree.get(unit)}
