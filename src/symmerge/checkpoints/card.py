"""The model card: README.md of a written checkpoint, ready for the hub, from its provenance.

Paths of this machine do not belong there: a model is called by its name on the hub, or by the name
of its folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from symmerge.checkpoints.hub import NAME
from symmerge.checkpoints.licenses import joint_license
from symmerge.checkpoints.provenance import HistoryStep, Parent, Provenance, Verdict

PROJECT = "symmerge"
NOT_STOCK = (
    "**It is not a stock checkpoint**: its heads have twice the size, for research."
    " Only symmerge loads it."
)
# Task of a family's table -> the hub's pipeline, and the class that loads the model.
PIPELINES = {
    "causal-lm": ("text-generation", "AutoModelForCausalLM"),
    "seq2seq-lm": ("text2text-generation", "AutoModelForSeq2SeqLM"),
    "speech-to-text": ("automatic-speech-recognition", "AutoModelForSpeechSeq2Seq"),
    "audio-classification": ("audio-classification", "AutoModelForAudioClassification"),
    "speech-features": ("feature-extraction", "AutoModel"),
    "masked-lm": ("fill-mask", "AutoModelForMaskedLM"),
    "image-classification": ("image-classification", "AutoModelForImageClassification"),
    "text-classification": ("text-classification", "AutoModelForSequenceClassification"),
    "token-classification": ("token-classification", "AutoModelForTokenClassification"),
    "question-answering": ("question-answering", "AutoModelForQuestionAnswering"),
    "text-features": ("feature-extraction", "AutoModel"),
}


def public_name(where: str) -> str:
    """A model's name without the folders of this machine.

    >>> public_name("/home/me/seed-0"), public_name("org/model"), public_name("../seed-1/")
    ('seed-0', 'org/model', 'seed-1')
    """
    if NAME.fullmatch(where):
        return where
    return where.rstrip("/").rpartition("/")[2] or "model"


def model_card(provenance: Provenance, quality: str = "") -> str:
    """A card in the hub's form; `quality` is Markdown that says how good the model is."""
    merge = next((step for step in provenance.steps if step.parents is not None), None)
    record = provenance.to_json()
    origin = {key: record[key] for key in ("source_sha256", "spec_sha256", "versions")}
    sections = [
        _front_matter(provenance, merge),
        f"# {_title(provenance, merge)}",
        _kind(provenance, merge),
        f"## How good is it?\n{quality}" if quality else "",
        _usage(provenance),
        f"## What was done\n{_steps(provenance)}",
        _parents(merge) if merge else _verdict(provenance.verified),
        "## Provenance\nThe whole record is [symmerge.json](symmerge.json).\n\n"
        f"```json\n{json.dumps(origin, indent=2)}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(provenance: Provenance, merge: HistoryStep | None) -> str:
    parents = _parents_of(merge)
    bases = [public_name(parent.where) for parent in parents] or [public_name(provenance.source)]
    licenses = [parent.license for parent in parents] or [provenance.license]
    lines = ["base_model:", *(f"- {_quoted(name)}" for name in dict.fromkeys(bases))]
    if license := joint_license(licenses):
        lines.append(f"license: {license}")
    lines.append("library_name: transformers")
    if provenance.task in PIPELINES:
        lines.append(f"pipeline_tag: {PIPELINES[provenance.task][0]}")
    lines += ["tags:", *(["- merge"] if merge else []), f"- {PROJECT}"]
    return "\n".join(["---", *lines, "---"])


def _quoted(name: str) -> str:
    """A name as YAML takes it; one of letters, digits and dashes needs no quotes."""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", name) and name.lower() not in ("yes", "no", "null")
    return name if plain else json.dumps(name)


def _parents_of(merge: HistoryStep | None) -> tuple[Parent, ...]:
    return (merge.parents or ()) if merge else ()


def _title(provenance: Provenance, merge: HistoryStep | None) -> str:
    names = [public_name(parent.where) for parent in _parents_of(merge)]
    if not names:
        return f"{public_name(provenance.source)}, moved along its symmetries"
    return f"Merge of {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _kind(provenance: Provenance, merge: HistoryStep | None) -> str:
    if not provenance.stock:
        return NOT_STOCK
    by = f"Written by symmerge {provenance.versions['symmerge']}."
    if merge is None:
        return (
            f"A stock {provenance.architecture}: other weights than"
            f" {public_name(provenance.source)}, the same function. {by}"
        )
    method = merge.details.get("method", "mean")
    how = "averaged" if method == "mean" else f"combined by {method}"
    before = "aligned by their symmetries, then " if merge.evidence else ""
    after = "" if merge.evidence else " as they are, without alignment"
    if any(step.step == "heal" for step in provenance.steps):
        after += ", then healed: all weights learned from the parents' answers"
    return (
        f"A stock {provenance.architecture} of the parents' size: {len(merge.parents or ())} models"
        f" were {before}{how}{after}. {by}"
    )


def _usage(provenance: Provenance) -> str:
    if not provenance.stock or provenance.task not in PIPELINES:
        return ""
    loader = PIPELINES[provenance.task][1]
    return (
        f"## Use\n```python\nfrom transformers import {loader}\n\n"
        f'model = {loader}.from_pretrained("path/to/this/model")\n```'
    )


def _steps(provenance: Provenance) -> str:
    lines = [
        f"{number}. **{step.step}**: {without_paths(step.what)}"
        for number, step in enumerate(provenance.steps, 1)
    ]
    return "\n".join(lines) or "Nothing: the weights are the source's."


def without_paths(text: str) -> str:
    """A sentence with the folders of this machine cut from the names in it.

    >>> without_paths("0.5 x /home/me/seed-0, 0.5 x org/model")
    '0.5 x seed-0, 0.5 x org/model'
    """
    words = re.split(r"(\s+|,)", text)
    return "".join(public_name(word) if _is_path(word) else word for word in words)


def _is_path(word: str) -> bool:
    return bool(re.match(r"(~|\.\.?)?/[^/]", word)) or word.count("/") > 1


def _parents(merge: HistoryStep) -> str:
    """The merged models, and what was done to each before."""
    rows = [
        f"| {public_name(parent.where)} | {parent.weight:.3g} | {parent.license or 'unknown'}"
        f" | {_before(parent.steps)} | `{parent.sha256[:16]}` |"
        for parent in _parents_of(merge)
    ]
    table = [
        "| model | weight | licence | done before | sha256 |",
        "|---|---|---|---|---|",
        *rows,
    ]
    conflict = _conflict([parent.license for parent in _parents_of(merge)])
    sections = ["## Parents", *table, *conflict, ""]
    if merge.evidence is None:
        return "\n".join([*sections, "They were averaged as they are: nothing was aligned."])
    evidence = [
        f"- {name.replace('_', ' ')}: {without_paths(str(value))}"
        for name, value in merge.evidence.items()
    ]
    return "\n".join([*sections, "## Evidence that they belong together", *evidence])


def _conflict(licenses: Sequence[str | None]) -> list[str]:
    """A warning where the parents' licences differ."""
    if len(set(licenses)) < 2:
        return []
    names = _listed([license or "an unknown one" for license in dict.fromkeys(licenses)])
    return ["", f"**The parents' licences differ** ({names}): read both before you publish this."]


def _before(steps: tuple[HistoryStep, ...]) -> str:
    said = "; ".join(f"{step.step}: {without_paths(step.what)}" for step in steps)
    return said.replace("|", "/") or "as it is"


def _verdict(verdict: Verdict | None) -> str:
    text = "Not checked: it was written without verification."
    if verdict:
        tensors = f"All {verdict.tensors} tensors are transports of the source's, computed again."
        text = (
            f"Yes. {tensors if verdict.tensors else ''}\nRelative difference of the logits"
            f" {verdict.difference:.1e} (one more rounding makes {verdict.rounding:.1e}),"
            f" largest absolute difference {verdict.largest:.1e}, on {verdict.inputs}."
        )
    return f"## Is it the same function?\n{text}"
