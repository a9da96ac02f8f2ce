"""Build wheel and sdist, and check them: metadata, contents, and a merge in a clean environment.

    python tools/dist.py dist

The clean environment has runtime dependencies only, in the versions of constraints.txt. It trains
two small models and merges them, so that nothing of the checkout is needed by what is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c")
NEEDED = ("symmerge/report/page.html", "symmerge/py.typed", "symmerge/cli/merge.py")
FORBIDDEN = ("tests/", "docs/", "experiments/", ".github/")
COMMANDS = (
    ("--version",),
    ("--help",),
    *(("train", "gpt2-docs", "--seed", n, "--steps", "20", "--out", f"s{n}") for n in "01"),
    ("merge", "s0", "s1", "--effort", "fast", "--out", "merged"),
    ("verify", "merged", "merged"),
)


def python_of(folder: Path) -> Path:
    """A virtual environment's Python; made if it is not there."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """One command, without the checkout on Python's path; its failure ends the program."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(command, cwd=cwd, env=clean, check=True)


def build(target: Path, environment: Path) -> tuple[Path, Path]:
    """Wheel and sdist, with a check of their metadata."""
    python = python_of(environment)
    run(python, *PIP, ROOT / "constraints.txt", "build", "twine")
    for old in (*target.glob("symmerge-*.whl"), *target.glob("symmerge-*.tar.gz")):
        old.unlink()
    run(python, "-m", "build", "--outdir", target.absolute(), ROOT)
    wheel, sdist = next(target.glob("symmerge-*.whl")), next(target.glob("symmerge-*.tar.gz"))
    run(python, "-m", "twine", "check", "--strict", wheel.absolute(), sdist.absolute())
    return wheel.absolute(), sdist.absolute()


def complaints(names: list[str]) -> list[str]:
    """What is missing from a wheel's files, and what does not belong there."""
    missing = [f"{name} is missing" for name in NEEDED if name not in names]
    return missing + [f"{name} is in it" for name in names if name.startswith(FORBIDDEN)]


def check_contents(wheel: Path, sdist: Path) -> None:
    """Package data is in the wheel, tests are not; the sdist has what a build needs."""
    with zipfile.ZipFile(wheel) as archive:
        bad = complaints(archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    bad += [f"{name} is missing" for name in ("pyproject.toml", "README.md") if name not in names]
    if bad:
        sys.exit(f"the distribution is wrong: {', '.join(bad)}")


def try_out(wheel: Path) -> None:
    """Install the wheel into a clean environment and merge two small models there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        python = python_of(place / "venv")
        # torch first: a bare requirement would bring gigabytes of CUDA where a CPU build serves
        run(python, *PIP, ROOT / "constraints.txt", "torch")
        run(python, *PIP, ROOT / "constraints.txt", wheel)
        for command in COMMANDS:
            run(place / "venv" / "bin" / "symmerge", *command, cwd=place)
        run(python, "-m", "pip", "check")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/dist.py FOLDER")
    wheel, sdist = build(Path(sys.argv[1]), ROOT / "build" / "dist-venv")
    check_contents(wheel, sdist)
    try_out(wheel)
    print(f"built and tried out: {wheel.name}, {sdist.name}")


if __name__ == "__main__":
    main()
