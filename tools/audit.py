"""Known vulnerabilities in what is installed: runs pip-audit in an environment of its own.

    python tools/audit.py build/audit

Exit code 0: none known, or skipped because pip-audit or its advisories cannot be reached (it says
so); 1: some, listed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

SECONDS = 300
MANY = 0.5  # a larger share that cannot be asked about is no answer


def verdict(answer: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit code and lines for what pip-audit answered as JSON."""
    packages = answer["dependencies"]
    asked = [one for one in packages if "vulns" in one]
    unknown = [one["name"] for one in packages if "vulns" not in one]
    vulnerable = [
        f"{one['name']} {one['version']}: {flaw['id']},"
        f" fixed in {', '.join(flaw['fix_versions']) or 'no version yet'}"
        for one in asked
        for flaw in one["vulns"]
    ]
    if vulnerable:
        return 1, vulnerable
    if len(unknown) > MANY * len(packages):  # pip-audit's own exit code is 0 then
        return 0, [f"skipped: {len(unknown)} of {len(packages)} packages could not be asked about"]
    without = f"; not asked about: {', '.join(unknown)}" if unknown else ""
    return 0, [f"no known vulnerabilities in {len(asked)} packages{without}"]


def parse(said: str) -> dict[str, Any] | None:
    """The answer; None if there is none, which means that the service was not reached."""
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "dependencies" in answer else None


def install(folder: Path) -> Path | None:
    """pip-audit in its own environment; None if it cannot be installed."""
    program = folder / "bin" / "pip-audit"
    if program.exists():
        return program
    venv.create(folder, with_pip=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "pip-audit>=2.7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return program if ended.returncode == 0 else None


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/audit.py FOLDER")
    program = install(Path(sys.argv[1]).absolute())
    if program is None:
        print("skipped: pip-audit cannot be installed here")
        return
    command = [program, "--path", sysconfig.get_path("purelib"), "--skip-editable"]
    command += ["--progress-spinner", "off", "--format", "json"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout
    except subprocess.TimeoutExpired:
        said = ""
    if (answer := parse(said)) is None:
        print("skipped: the service with advisories did not answer")
        return
    code, lines = verdict(answer)
    print("\n".join(lines))
    sys.exit(code)


if __name__ == "__main__":
    main()
