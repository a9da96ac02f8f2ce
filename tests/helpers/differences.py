"""How far two models' logits are apart in float64, relative to those of the first.

`verify` measures this and what rounding does besides, which takes three times as many runs.
"""

import torch

from symmerge.verification.inputs import samples
from symmerge.verification.judging import centred, rms
from symmerge.verification.modules import logits_of
from symmerge.verification.verdict import check_comparable, has_softmax

REMEMBERED = 4  # models: many tests compare one with all that was made of it
_known = {}


def difference(a, b):
    """What `verify(a, b, dtype=torch.float64).difference` is."""
    check_comparable(a, b)
    return max(
        apart(logits, other[name], softmax=has_softmax(a, logits))
        for outputs, other in zip(remembered(a), all_logits(b, like=a), strict=True)
        for name, logits in outputs.items()
    )


def apart(first, second, *, softmax):
    if not (first.isfinite().all() and second.isfinite().all()):
        return torch.inf
    return (rms(centred(first - second, softmax)) / rms(centred(first, softmax))).item()


def all_logits(model, *, like):
    """By sample, then by name; the inputs are those that suit another model."""
    kept = model.cached()
    return [logits_of(kept, sample, dtype=torch.float64) for sample in samples(like, 0)]


def remembered(model):
    if id(model) not in _known:
        _known[id(model)] = model, all_logits(model, like=model)
        for oldest in list(_known)[:-REMEMBERED]:
            del _known[oldest]
    return _known[id(model)][1]
