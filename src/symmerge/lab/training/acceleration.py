"""Training on a GPU at the fastest level that works, in other processes: an error on the GPU can leave a process unusable.

A process that has trained a model waits for the next one: what was compiled for the first serves all of its kind.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from symmerge import errors
from symmerge.errors import SymmergeError
from symmerge.lab.training.initialization import Origin
from symmerge.models.model import Progress

LEVELS = ("compile+graph", "graph", "eager")
PATIENCE = 5.0  # seconds until a process that is told to go is ended


def levels_of(task: str) -> tuple[str, ...]:
    """Rows of text differ in length, which neither a graph nor the compiler takes well."""
    return ("eager",) if task == "text" else LEVELS


def at_some_level(
    origin: Origin,
    out: Path,
    progress: Progress | None,
    *,
    levels: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Train in another process; what one level has done, the next goes on from."""
    for level in levels or levels_of(origin.recipe.task):
        process = _from_waiting(level) or _Process()
        job = {"origin": origin, "out": out, "level": level, "options": options}
        try:
            last = process.train(job, progress)
        except BaseException:
            process.end()
            raise
        if last is None:
            process.end()
            print(f"{level} failed, its reasons are above", file=sys.stderr, flush=True)
            continue
        _waiting[level] = process
        if "refused" in last:  # the input is at fault: no other level would help
            raise getattr(errors, last["refused"], SymmergeError)(last["why"])
        return
    raise SymmergeError(
        "training failed at every level: the reasons are above; --device cpu may work"
    )


def _from_waiting(level: str) -> _Process | None:
    """The process that waits at a level, if it can be had: one may have heard Ctrl-C, or have been started elsewhere."""
    found = _waiting.pop(level, None)
    if found and not (found.alive and found.surroundings == _surroundings()):
        found.end()
        return None
    return found


class _Process:
    """Trains one model after the other, until its input ends."""

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "symmerge.lab.training.acceleration"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._popen.stdin and self._popen.stdout
        self._in, self._out = self._popen.stdin, self._popen.stdout

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def train(self, job: dict[str, Any], progress: Progress | None) -> dict[str, Any] | None:
        """The last word about a job; none, if the process died of it."""
        with suppress(BrokenPipeError):
            pickle.dump(job, self._in)
            self._in.flush()
            for said in self._said():
                if "step" not in said:
                    return said
                if progress:
                    progress(said["step"])
        return None

    def _said(self) -> Iterator[dict[str, Any]]:
        for line in self._out:
            with suppress(ValueError):
                if isinstance(said := json.loads(line), dict):  # else some library speaks
                    yield said

    def end(self) -> None:
        with suppress(OSError):
            self._in.close()
        self._popen.terminate()
        try:
            self._popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._out.close()


_waiting: dict[str, _Process] = {}  # by level


@atexit.register
def _end_all() -> None:
    while _waiting:
        _waiting.popitem()[1].end()


def _surroundings() -> Any:
    """What a process has from where it was started: it serves those who have the same."""
    return Path.cwd(), dict(os.environ)


def _main() -> None:
    from symmerge.lab.training.loop import train

    compiled_for = None
    while job := _next_job():
        origin: Origin = job["origin"]
        kind = origin.recipe.architecture, origin.recipe.config, origin.recipe.schedule.batch_size
        if compiled_for not in (
            None,
            kind,
        ):  # the compiler keeps a few forms of a function, and then gives up
            torch.compiler.reset()
        compiled_for = kind
        begun = {
            "begin": origin.begin,
            "fresh": origin.fresh,
            "only_fresh": origin.only_fresh,
            "head_seed": origin.head_seed,
        }
        try:
            train(
                origin.recipe,
                origin.seed,
                job["out"],
                lambda item: _tell(step=item),
                resume=True,
                level=job["level"],
                **begun,
                **job["options"],
            )
            last = {"done": True}
        except SymmergeError as error:
            last = {"refused": type(error).__name__, "why": str(error)}
        except KeyboardInterrupt as error:  # the parent was interrupted, too, and says so
            raise SystemExit(130) from error
        gc.collect()  # graphs and what they hold
        torch.cuda.empty_cache()
        _tell(**last)


def _next_job() -> dict[str, Any] | None:
    try:
        return pickle.load(sys.stdin.buffer)
    except (EOFError, KeyboardInterrupt):  # whoever asked is gone
        return None


def _tell(**what: Any) -> None:
    try:
        print(json.dumps(what), flush=True)
    except BrokenPipeError:  # whoever asked was killed; nobody is left to tell
        os._exit(1)


if __name__ == "__main__":
    _main()
