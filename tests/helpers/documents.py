"""Documents as tests see them: blocks that run, links, anchors, words."""

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from fixtures import run

from symmerge.cli import VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")))
BLOCK = re.compile(r"^<!-- run(?: needs=(\w+))? -->\n```(bash|python)\n(.*?)^```$", re.M | re.S)
FENCED = re.compile(r"^```.*?^```$|<!--.*?-->", re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)")
OUTSIDE = re.compile(r"[a-z]+:")
# What a reader waits for is made small: seconds, not minutes.
SMALL = {
    "train": ("--steps", "20"),
    "barrier": ("--points", "3", "--samples", "8"),
    "evaluate": ("--samples", "8"),
}
TRAINED = {}  # options -> folder
FEWER = {re.compile(r"^STEPS = \d+$", re.M): "STEPS = 20", re.compile(r"steps=\d+"): "steps=5"}


@dataclass(frozen=True)
class Block:
    """A block of code that is marked to run; `needs` is a verb without which it cannot."""

    kind: str
    code: str
    needs: str | None = None

    def possible(self):
        return self.needs is None or self.needs in VERBS

    def execute(self):
        """Run it in the current folder; commands in this process, to import torch only once."""
        if self.kind == "python":
            code = self.code
            for many, few in FEWER.items():
                code = many.sub(few, code)
            exec(compile(code, "block", "exec"), {"__name__": "block"})
            return
        for line in self.code.replace("\\\n", " ").splitlines():
            execute_command(line)


def execute_command(line):
    """One line of a shell: a comment, or `symmerge ...  # exit code 1`."""
    command, _, comment = line.partition("#")
    words = shlex.split(command)
    if not words:
        return
    assert words[0] == "symmerge", f"only symmerge is run here: {line}"
    expect = int(comment.split()[-1]) if "exit code" in comment else 0
    verb, *arguments = words[1:]
    if verb == "train":
        train(arguments)
    else:
        learned = ("--steps", "12") if verb == "barrier" and "standard" in command else ()
        run(verb, *arguments, *SMALL.get(verb, ()), *learned, expect=expect)


def train(arguments):
    """Train, or copy what an earlier page trained in the same way."""
    *how, option, out = arguments
    assert option == "--out", f"--out comes last: {arguments}"
    if tuple(how) in TRAINED:
        shutil.copytree(TRAINED[tuple(how)], out)
        return
    run("train", *how, "--out", out, *SMALL["train"])
    TRAINED[tuple(how)] = Path(out).absolute()


def blocks(text):
    return [Block(kind, code, needs or None) for needs, kind, code in BLOCK.findall(text)]


def links(text):
    """Targets of links and images, outside code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return [target for target in LINK.findall(prose) if not OUTSIDE.match(target)]


def anchors(text):
    """Anchors that both the site and the forge's own view of a page make of its headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).lower() for heading in headings]
    kept = [re.sub(r"[^\w\s-]", "", heading).strip() for heading in plain]
    return {one.replace(" ", "-") for one in kept} & {re.sub(r"[-\s]+", "-", one) for one in kept}


def broken_links(page, text=None):
    """Links of a page whose file or anchor does not exist."""
    text = page.read_text("utf-8") if text is None else text
    return [target for target in links(text) if not _exists(page, text, target)]


def _exists(page, text, target):
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists() or not file.is_relative_to(ROOT):
        return False
    if not anchor:
        return True
    return anchor in anchors(file.read_text("utf-8") if path else text)
