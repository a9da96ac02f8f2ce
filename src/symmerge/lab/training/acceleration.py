"""Training on a GPU with the fastest acceleration that works, in separate processes.

A GPU error can leave a process unusable. A process that has trained a model waits for the next
one, so that models of one kind are compiled once.
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
from symmerge.models.progress import Progress

ACCELERATIONS = ("compile+graph", "graph", "eager")
PATIENCE = 5.0  # seconds until a process that was told to end is killed


def accelerations_of(task: str) -> tuple[str, ...]:
    """Accelerations to try; labelled texts vary in length, so no graphs and no compiler."""
    return ("eager",) if task == "text" else ACCELERATIONS


def train_accelerated(
    origin: Origin,
    out: Path,
    progress: Progress | None,
    *,
    accelerations: Sequence[str] | None = None,
    **options: object,
) -> None:
    """Train in another process; if one acceleration fails, the next resumes from its state."""
    for acceleration in accelerations or accelerations_of(origin.recipe.task):
        process = _take_waiting(acceleration) or _Process()
        job = {"origin": origin, "out": out, "acceleration": acceleration, "options": options}
        try:
            answer = process.train(job, progress)
        except BaseException:
            process.end()
            raise
        if answer is None:
            process.end()
            print(f"{acceleration} failed, its reasons are above", file=sys.stderr, flush=True)
            continue
        _waiting[acceleration] = process
        if "refused" in answer:  # the input is at fault: nothing else would help
            raise getattr(errors, answer["refused"], SymmergeError)(answer["why"])
        return
    raise SymmergeError(
        "training failed with every acceleration: the reasons are above; try --device cpu"
    )


def _take_waiting(acceleration: str) -> _Process | None:
    """The waiting process, unless it has ended (Ctrl-C) or belongs to another environment."""
    process = _waiting.pop(acceleration, None)
    if process and not (process.alive and process.environment == _environment()):
        process.end()
        return None
    return process


class _Process:
    """A process that trains one model after another, until its input ends."""

    def __init__(self) -> None:
        self.environment = _environment()
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
        """The answer to a job; None if the process died."""
        with suppress(BrokenPipeError):
            pickle.dump(job, self._in)
            self._in.flush()
            for message in self._messages():
                if "step" not in message:
                    return message
                if progress:
                    progress(message["step"])
        return None

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._out:
            with suppress(ValueError):
                if isinstance(message := json.loads(line), dict):  # else some library printed it
                    yield message

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


_waiting: dict[str, _Process] = {}  # acceleration -> process


@atexit.register
def _end_all() -> None:
    while _waiting:
        _waiting.popitem()[1].end()


def _environment() -> tuple[Path, dict[str, str]]:
    """Environment a process was started in; it only serves callers with the same one."""
    return Path.cwd(), dict(os.environ)


def _main() -> None:
    compiled_for = None
    while job := _next_job():
        recipe = job["origin"].recipe
        kind = recipe.architecture, recipe.config, recipe.schedule.batch_size
        if compiled_for not in (None, kind):  # the compiler gives up after a few variants
            torch.compiler.reset()
        compiled_for = kind
        try:
            _train(**job)
            answer = {"done": True}
        except SymmergeError as error:
            answer = {"refused": type(error).__name__, "why": str(error)}
        except KeyboardInterrupt as error:  # the parent was interrupted, too, and says so
            raise SystemExit(130) from error
        gc.collect()  # frees graphs and their memory
        torch.cuda.empty_cache()
        _send(**answer)


def _train(origin: Origin, out: Path, acceleration: str, options: dict[str, Any]) -> None:
    from symmerge.lab.training.loop import train

    train(
        origin.recipe,
        origin.seed,
        out,
        lambda line: _send(step=line),
        resume=True,
        acceleration=acceleration,
        begin=origin.begin,
        fresh=origin.fresh,
        only_fresh=origin.only_fresh,
        head_seed=origin.head_seed,
        **options,
    )


def _next_job() -> dict[str, Any] | None:
    try:
        return pickle.load(sys.stdin.buffer)
    except (EOFError, KeyboardInterrupt):  # the caller is gone
        return None


def _send(**message: object) -> None:
    try:
        print(json.dumps(message), flush=True)
    except BrokenPipeError:  # the caller was killed
        os._exit(1)


if __name__ == "__main__":
    _main()
