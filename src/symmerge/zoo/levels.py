"""Training on a GPU at the fastest level that works. Each has a process of its own: an error on the GPU can leave a process unusable."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symmerge import errors
from symmerge.errors import SymmergeError
from symmerge.model import Progress
from symmerge.zoo.origin import Origin

LEVELS = ("compile+graph", "graph", "eager")
REFUSED = 2  # the input is at fault: no other level would help


def levels_of(task: str) -> tuple[str, ...]:
    """Rows of text differ in length, which neither a graph nor the compiler takes well."""
    return ("eager",) if task == "text" else LEVELS


def at_some_level(origin: Origin, out: Path, progress: Progress | None, *, levels: Sequence[str] | None = None, **options: Any) -> None:
    """Train in another process; what one level has done, the next goes on from."""
    for level in levels or levels_of(origin.recipe.task):
        job = {"origin": origin, "out": out, "level": level, "options": options}
        command = [sys.executable, "-m", "symmerge.zoo.levels"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin and process.stdout
            try:
                process.stdin.write(pickle.dumps(job))
                process.stdin.close()
                refusal = _follow(process.stdout, progress)
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 0:
            return
        if refusal:
            raise getattr(errors, refusal["refused"], SymmergeError)(refusal["why"])
        print(f"{level} failed, its reasons are above", file=sys.stderr, flush=True)
    raise SymmergeError("training failed at every level: the reasons are above; --device cpu may work")


def _follow(lines: Any, progress: Progress | None) -> dict[str, str] | None:
    """Pass on what a process tells; the last word, if it refused."""
    refusal = None
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # not ours: some library speaks
            continue
        if "refused" in said:
            refusal = said
        elif progress:
            progress(said["step"])
    return refusal


def _main() -> None:
    from symmerge.zoo.train import train

    job = pickle.load(sys.stdin.buffer)
    origin: Origin = job["origin"]
    begun = {"begin": origin.begin, "fresh": origin.fresh, "only_fresh": origin.only_fresh, "head_seed": origin.head_seed}
    try:
        train(origin.recipe, origin.seed, job["out"], _tell, resume=True, level=job["level"], **begun, **job["options"])
    except SymmergeError as error:
        print(json.dumps({"refused": type(error).__name__, "why": str(error)}), flush=True)
        raise SystemExit(REFUSED) from error
    except KeyboardInterrupt as error:  # the parent was interrupted, too, and says so
        raise SystemExit(130) from error


def _tell(item: str) -> None:
    print(json.dumps({"step": item}), flush=True)


if __name__ == "__main__":
    _main()
