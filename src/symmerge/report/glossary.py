"""Words explained where they are used: a term opens its definition, without any script."""

from __future__ import annotations

import re
from collections.abc import Mapping

from markupsafe import Markup, escape

WORDS: Mapping[str, str] = {
    "barrier": (
        "How much higher the loss of the worst merge on the path is than the mean of the two"
        " parents. Zero: every merge on the path is as good as they are."
    ),
    "midpoint": "The model half way on the path: the even average of all weights, at t = 0.5.",
    "ensemble": (
        "All parents run side by side, and their predictions averaged. Often better than a merge,"
        " at the cost of all parents."
    ),
    "plain average": "The weights averaged as they are, without alignment.",
    "alignment": (
        "A change of a model's weights that leaves its function as it is: units and heads are"
        " reordered and coordinates rotated, until they fit those of the other model."
    ),
    "damage": (
        "The loss of the plain average less the mean loss of its parents. What alignment takes"
        " away of it is repaired."
    ),
    "perplexity": "e to the power of the loss; the lower, the better.",
    "accuracy": "The share of right answers; the higher, the better.",
    "parents": "The models that are merged.",
    "spread": "Distance of the models from their mean, over their own norm.",
    "cycle error": "How far going round three models is from changing nothing: rounding only.",
    "effort": "How much time a method may take to find an alignment: fast, standard or best.",
}
# The longest first: "plain average" is no average that is plain.
PATTERN = re.compile(
    rf"\b({'|'.join(sorted(map(re.escape, WORDS), key=len, reverse=True))})(?=s?\b)", re.IGNORECASE
)


def word_id(word: str) -> str:
    """The id of a definition on the page."""
    return f"word-{word.replace(' ', '-')}"


def explained(text: str) -> Markup:
    """Escaped text in which the first use of every known word is a button that explains it."""
    seen: set[str] = set()

    def button(match: re.Match[str]) -> str:
        word = match[1].lower()
        if word in seen:
            return match[0]
        seen.add(word)
        return (
            f'<button type="button" class="term" popovertarget="{word_id(word)}"'
            f' title="{escape(WORDS[word])}">{match[0]}</button>'
        )

    # After escaping: no word is part of an entity, and user text cannot bring markup of its own.
    return Markup(PATTERN.sub(button, str(escape(text))))
