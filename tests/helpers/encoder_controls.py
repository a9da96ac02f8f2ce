"""Forbidden elements of further heads of encoders."""

from further_controls import ANY_QK, GATE, GELU, HEADS, ONES, SHOWN, SIGNS
from negative_controls import TIED_DECODER, Control, left_behind, wrong_group

from symmerge.symmetry.groups import ScaledPermutation

ENCODER_HEADS: dict[str, dict[str, Control]] = {
    "bert-causal": {**SIGNS, **GELU, **TIED_DECODER},
    "bert-next": {
        **SIGNS,
        "scales on the tanh pooler": wrong_group("pooled", ScaledPermutation),
        "head left behind": left_behind("bert.pooler.dense.weight"),
    },
    "roformer-tokens": {**SIGNS, **ANY_QK, "head left behind": left_behind("classifier.weight")},
    "roformer-features": {**SHOWN, **GELU, **ANY_QK},
    "modernbert-answers": {**ONES, **GATE, "head left behind": left_behind("head.dense.weight")},
    "modernbert-features": {**SHOWN, **GATE, **HEADS},
}
