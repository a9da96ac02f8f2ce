"""Forbidden elements of further heads of encoders."""

from further_controls import ANY_QK, GATE, GELU, HEADS, ONES, SHOWN, SIGNS
from negative_controls import Control, left_behind

ENCODER_HEADS: dict[str, dict[str, Control]] = {
    "roformer-tokens": {**SIGNS, **ANY_QK, "head left behind": left_behind("classifier.weight")},
    "roformer-features": {**SHOWN, **GELU, **ANY_QK},
    "modernbert-answers": {**ONES, **GATE, "head left behind": left_behind("head.dense.weight")},
    "modernbert-features": {**SHOWN, **GATE, **HEADS},
}
