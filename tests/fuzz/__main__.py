"""python -m fuzz --seed 1 --cases 2000; python -m fuzz --replay FILE."""

from __future__ import annotations

import os
import sys

# Before torch is imported: threads do not survive a fork.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import argparse
import hashlib
import shutil
import tempfile
import time
from pathlib import Path

from fuzz.cases import Case, make_case
from fuzz.damage import Damage
from fuzz.judge import Outcome
from fuzz.runner import Tally, run_cases
from fuzz.samples import make_samples
from fuzz.targets import TARGETS, Target


def main() -> int:
    options = _options()
    work = Path(tempfile.mkdtemp(prefix="symmerge-fuzz-"))
    try:
        samples = work / "samples"
        make_samples(samples)
        if options.replay:
            return _replay(options.replay, samples, work)
        if broken := [] if options.quick else _controls(samples, work, options.jobs):
            print("\n".join(["good inputs must be accepted:", *broken]))
            return 1
        return _fuzz(options, samples, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="quick verbs, no good inputs")
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--kept", type=Path, default=Path("fuzz-unclean"), help="unclean cases")
    parser.add_argument("--replay", type=Path, help="one of them, again")
    return parser.parse_args()


def _controls(samples: Path, work: Path, jobs: int) -> list[str]:
    """Every command once on inputs that are good: those that are refused."""
    broken: list[str] = []

    def tell(case: Case, outcome: Outcome) -> None:
        if outcome.kind not in ("done", "no"):
            broken.append(f"{_about(case)}: {outcome}")

    cases = {
        (target.sample, command): Case(target.name, _unchanged(target, samples), command)
        for target in TARGETS
        for command in target.commands
    }
    tally = run_cases(cases.values(), samples, work / "controls", jobs=jobs, tell=tell)
    print(f"{tally.cases} good inputs, {len(broken)} refused")
    return broken


def _unchanged(target: Target, samples: Path) -> Damage:
    return Damage("none", content=(samples / target.sample / target.file).read_bytes())


def _fuzz(options: argparse.Namespace, samples: Path, work: Path) -> int:
    began = time.monotonic()
    targets = [target for target in TARGETS if options.only in target.name]
    most = 1 if options.quick else None
    cases = (make_case(options.seed, n, samples, targets, most) for n in range(options.cases))
    tally = run_cases(cases, samples, work / "cases", jobs=options.jobs, tell=_tell_unclean)
    print(f"seed {options.seed}, {tally.cases} cases, {time.monotonic() - began:.0f} s")
    print("\n".join(tally.table()))
    _keep(tally, options.kept)
    print("unclean: none" if not tally.unclean else f"unclean: {len(tally.unclean)} kinds")
    return int(bool(tally.unclean))


def _tell_unclean(case: Case, outcome: Outcome) -> None:
    """At once: a long run is worth watching."""
    if not outcome.clean:
        print(f"{outcome.kind}: {outcome.where or outcome.said}", flush=True)


def _keep(tally: Tally, folder: Path) -> None:
    """The first case of every kind of unclean outcome, as a file to replay."""
    for (kind, where, _), found in sorted(tally.unclean.items()):
        case, outcome = found[0]
        text = case.to_json()
        file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        print(f"{kind} x{len(found)}: {where}\n  {outcome.said}\n  {_about(case)}")
        print(f"  make fuzz REPLAY={file}")


def _about(case: Case) -> str:
    return f"{case.target}; {case.damage.what}; symmerge {' '.join(case.command)}"


def _replay(file: Path, samples: Path, work: Path) -> int:
    case = Case.from_json(file.read_text())
    said: list[Outcome] = []
    run_cases([case], samples, work / "case", tell=lambda _, outcome: said.append(outcome))
    print(f"{_about(case)}\n{said[0]}")
    return int(not said[0].clean)


if __name__ == "__main__":
    sys.exit(main())
