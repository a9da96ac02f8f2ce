"""What is no symmetry must show: forbidden elements change the logits.

Each control has an allowed twin that moves the same space, so that a control that always fires is
caught as well.
"""

from functools import cache, partial

import pytest
import torch
from differences import difference
from encoder_controls import ENCODER_HEADS
from further_controls import FURTHER
from negative_controls import (
    ALLOWED,
    FORBIDDEN,
    QUERIES_ACROSS_GROUPS,
    SCALED_GATE,
    TIED_DECODER,
    TORN_HEADS,
    AnySign,
    Control,
    all_of_the_stream,
    folded,
    left_behind,
    loaded,
    move,
    moving,
    regroup,
    scores_not_fixed,
    shown_permuted,
    wrong_group,
    wrong_pairs,
)
from seq2seq_controls import TWO_STACKS

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import SymmetryError
from symmerge.families import FAMILIES
from symmerge.lab.small_models import EVERY
from symmerge.models.model import rebind
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
)

# Permutations only: a post-LayerNorm stream, a GELU.
STREAM_SIGNS = {"signs on the stream": wrong_group("residual", SignedPermutation)}
GELU = {
    "signs on GELU": wrong_group("ff", SignedPermutation),
    "scales on GELU": wrong_group("ff", ScaledPermutation),
}
HEADS = {"torn heads": TORN_HEADS}
# A pre-LayerNorm stream, folded: rotations that move the ones vector, and what is no rotation.
LAYER_NORM = {
    **STREAM_SIGNS,
    "rotation that moves ones": wrong_group("residual", Orthogonal),
    "any matrix on the stream": wrong_group("residual", GeneralLinear),
}
RMS_NORM = {
    "any matrix on the stream": wrong_group("residual", GeneralLinear),
    "scales on the stream": wrong_group("residual", ScaledPermutation),
}
ROTARY = {
    "any matrix on rotary QK": wrong_group("qk", GeneralLinear),
    "rotation of rotary QK": wrong_group("qk", Orthogonal),
    "permutation across rotary pairs": wrong_group("qk", Permutation),
    "signs inside rotary pairs": wrong_group("qk", SignedPermutation),
}
HALVES, INTERLEAVED = (
    wrong_group("qk", lambda size, layout=layout: RotaryPairs(size, size, layout))
    for layout in ("halves", "interleaved")
)
# A class without a head: its stream is its output.
SHOWN = {"permutation of what is shown": Control(moving("ff"), shown_permuted)}
POOLED = Control(
    moving("ff"), lambda model: move(regroup(model, "pooled", SignedPermutation), "pooled")
)
HEAD_LEFT = {"head left behind": left_behind("lm_head.weight")}
GATED = {**RMS_NORM, **HEADS, **HEAD_LEFT, "scaled gate": SCALED_GATE}
LLAMA = {**GATED, **ROTARY}
# A norm and its gains leave one sign per rotary pair.
NORMED = {
    "turned pairs": wrong_pairs(lambda size: RotaryPairs(size, size)),
    "signs inside rotary pairs": wrong_pairs(Signs),
    "rotation of normed queries and keys": wrong_pairs(Orthogonal),
    "permutation of pairs": wrong_group("qk", Permutation),
}

FORBIDDEN_ELEMENTS: dict[str, dict[str, Control]] = {
    "bert": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "bert-untied": {
        **STREAM_SIGNS,
        **GELU,
        **HEADS,
        "signs on the transform": wrong_group("transform", SignedPermutation),
        "transform left behind": left_behind("cls.predictions.transform.dense.weight"),
    },
    "bert-classifier": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "scales on the tanh pooler": wrong_group("pooled", ScaledPermutation),
        "pooler left behind": left_behind("bert.pooler.dense.weight"),
    },
    "bert-tokens": {
        **STREAM_SIGNS,
        **GELU,
        "head left behind": left_behind("classifier.weight"),
    },
    "bert-answers": {
        **STREAM_SIGNS,
        **GELU,
        "head left behind": left_behind("qa_outputs.weight"),
    },
    "bert-features": {**GELU, **HEADS, **SHOWN, "signs on what is pooled": POOLED},
    "roberta": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "roberta-classifier": {
        "scales on the tanh classifier": wrong_group("classifier", ScaledPermutation)
    },
    "xlm-roberta": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "distilbert": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "distilbert-classifier": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "negative scales on the ReLU classifier": wrong_group("classifier", AnySign),
        "head left behind": left_behind("pre_classifier.weight"),
    },
    "roformer": {
        **STREAM_SIGNS,
        **GELU,
        **ROTARY,
        "pairs in halves": HALVES,
        **HEADS,
        **TIED_DECODER,
    },
    "roformer-classifier": {
        "any matrix on rotary values": wrong_group("vo", GeneralLinear),
        "rotary values in halves": wrong_group("vo", lambda size: RotaryPairs(size, size)),
        "rotation of the embedding that moves ones": wrong_group("embedding", Orthogonal),
        "signs on the GELU classifier": wrong_group("classifier", SignedPermutation),
        "projection left behind": left_behind("roformer.embeddings_project.weight"),
    },
    "modernbert": {
        **LAYER_NORM,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        "scaled gate": SCALED_GATE,
        "signs on the transform": wrong_group("transform", SignedPermutation),
        "attention without a norm left behind": left_behind("model.layers.0.attn.Wqkv.weight"),
        "embedding left behind": left_behind("model.embeddings.tok_embeddings.weight"),
    },
    "modernbert-classifier": {
        **LAYER_NORM,
        "scaled gate": SCALED_GATE,
        "shift of the embedding left behind": left_behind("model.embeddings.norm.bias"),
        "pooled head left behind": left_behind("head.dense.weight"),
    },
    "gpt2": {**LAYER_NORM, **GELU, **HEADS, **HEAD_LEFT},
    "gpt2-untied": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "final shift left behind": left_behind("transformer.ln_f.bias"),
    },
    "gpt2-classifier": {
        **LAYER_NORM,
        **GELU,
        "head left behind": left_behind("score.weight"),
    },
    "gpt2-choices": {
        "rotation that moves ones": wrong_group("residual", Orthogonal),
        **HEAD_LEFT,
        "choices left behind": left_behind("multiple_choice_head.summary.weight"),
    },
    "gpt2-features": {**GELU, **HEADS, **SHOWN},
    "vit": {
        **LAYER_NORM,
        **GELU,
        **HEADS,
        "class token left behind": left_behind("vit.embeddings.cls_token"),
    },
    "vit-features": {**GELU, **HEADS, **SHOWN},
    "vit-tanh": {"scales on tanh": wrong_group("ff", ScaledPermutation)},
    "dinov3": {
        **GELU,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        **SHOWN,
    },
    "dinov3-classifier": {
        **LAYER_NORM,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        "scaled gate": SCALED_GATE,
        "scores change places": Control(
            moving("residual"), lambda model: move(regroup(model, "label", Permutation), "label")
        ),
        "rotation that mixes scores with the rest": Control(moving("residual"), scores_not_fixed),
        "class token left behind": left_behind("embeddings.cls_token"),
        "registers left behind": left_behind("embeddings.register_tokens"),
        "patches left behind": left_behind("embeddings.patch_embeddings.weight"),
        "shift before keys without a bias left behind": left_behind("model.layer.0.norm1.bias"),
    },
    "llama": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "llama-classifier": {**RMS_NORM, **HEADS, "head left behind": left_behind("score.weight")},
    "llama-answers": {**RMS_NORM, **HEADS, "head left behind": left_behind("qa_outputs.weight")},
    "llama-features": {**ROTARY, **HEADS, **SHOWN, "scaled gate": SCALED_GATE},
    "mistral": LLAMA,
    "qwen2": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "qwen3": {**GATED, **NORMED, "queries across groups": QUERIES_ACROSS_GROUPS},
    "qwen3-tied": NORMED,
    "phi3": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "granite": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "starcoder2": {
        **LAYER_NORM,
        **GELU,
        **ROTARY,
        **HEADS,
        **HEAD_LEFT,
        "queries across groups": QUERIES_ACROSS_GROUPS,
    },
    "starcoder2-tied": {"negative scales on ReLU": wrong_group("ff", AnySign)},
    "stablelm": {**LAYER_NORM, **ROTARY, **HEADS, **HEAD_LEFT, "scaled gate": SCALED_GATE},
    "stablelm-parallel": {
        "rotation that moves ones": wrong_group("residual", Orthogonal),
        "gate left behind": left_behind("model.layers.0.mlp.gate_proj.weight"),
        "scaled gate": SCALED_GATE,
    },
    "olmo2": {
        "scales on the stream": wrong_group("residual", ScaledPermutation),
        "signs inside rotary pairs": wrong_pairs(Signs),
        "permutation of pairs": wrong_group("qk", Permutation),
        **HEADS,
        **HEAD_LEFT,
        "scaled gate": SCALED_GATE,
        "queries across groups": QUERIES_ACROSS_GROUPS,
    },
    "olmo3": {
        "scales on the stream": wrong_group("residual", ScaledPermutation),
        "signs inside rotary pairs": wrong_pairs(Signs),
        "output bias left behind": left_behind("model.layers.0.self_attn.o_proj.bias"),
    },
    "opt": {
        **LAYER_NORM,
        **HEADS,
        **HEAD_LEFT,
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "positions left behind": left_behind("model.decoder.embed_positions.weight"),
    },
    "opt-untied": {**LAYER_NORM, **GELU, **HEADS, **HEAD_LEFT},
    "opt-post-norm": {
        **STREAM_SIGNS,
        **HEADS,
        "negative scales on ReLU": wrong_group("ff", AnySign),
    },
    "neox": {**LAYER_NORM, **GELU, **ROTARY, **HEADS, **HEAD_LEFT},
    **FURTHER,
    **TWO_STACKS,
    **ENCODER_HEADS,
}
CASES = [(name, case) for name, controls in FORBIDDEN_ELEMENTS.items() for case in controls]


@cache
def allowed_change(name, allowed):
    return difference(folded(name), allowed(folded(name)))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_allowed_element_passes_and_the_forbidden_one_shows(name, case):
    control, model = FORBIDDEN_ELEMENTS[name][case], folded(name)
    assert allowed_change(name, control.allowed) <= ALLOWED
    assert difference(model, control.forbidden(model)) >= FORBIDDEN


def test_every_family_has_three_controls():
    variants = {"bert-untied", "dinov3-classifier", "mistral", "qwen2", "granite", "olmo3"}
    variants |= {name for name in EVERY if name.endswith(("-features", "-tokens", "-answers"))}
    variants |= {
        "gpt2-choices",
        "gpt2-classifier",
        "llama-classifier",
        "distilbert-classifier",
        "xlm-roberta",
    }
    variants |= {"opt-untied", "opt-post-norm", "t5-classifier"}
    variants |= {"bart-decoder", "whisper-decoder", "whisper-classifier"}
    names = {family.name for family in FAMILIES} | variants
    assert all(len(FORBIDDEN_ELEMENTS[name]) >= 3 for name in names)


ROTATING = (
    *("gpt2", "gpt2-untied", "vit", "neox", "llama", "mistral", "qwen2", "qwen3", "phi3", "opt"),
    *("modernbert-classifier", "dinov3-classifier", "starcoder2", "stablelm-parallel"),
)


@pytest.mark.parametrize("name", ROTATING)
def test_gains_that_are_not_folded_refuse_to_rotate(name):
    with pytest.raises(SymmetryError, match=r"(ln_|norm).*\.weight.*pointwise.*canonicalize"):
        difference(loaded(name), move(loaded(name), "residual"))
    assert difference(loaded(name), move(folded(name), "residual")) <= ALLOWED


def test_a_gain_of_scores_refuses_to_rotate():
    with pytest.raises(SymmetryError, match=r"norm\.weight.*pointwise"):
        difference(
            folded("dinov3-classifier"),
            move(all_of_the_stream(folded("dinov3-classifier")), "residual"),
        )


@pytest.mark.parametrize("group", [Orthogonal, GeneralLinear])
@pytest.mark.parametrize("name", ["bert", "roberta", "roformer", "olmo2", "clip_vision_model"])
def test_a_post_norm_stream_refuses_to_rotate(name, group):
    # Its gains sit on the stream: they cannot be folded.
    with pytest.raises(SymmetryError, match=r"(?i)laye?r_?norm\.weight.*pointwise"):
        difference(folded(name), move(regroup(folded(name), "residual", group), "residual"))


@pytest.mark.parametrize("seed", range(3))
def test_a_tied_decoder_that_was_copied_and_not_moved_shows(seed):
    # Without the tie, the copy must move with the stream like any other reader.
    model = loaded("gpt2").restrict(residual="permutation")
    weights = DerivedWeights(
        move(model, "residual", seed).weights,
        {"lm_head.weight": partial(model.weights.__getitem__, "transformer.wte.weight")},
        added={"lm_head.weight": (model.weights.shape("transformer.wte.weight"), torch.float64)},
    )
    untied = rebind(
        model,
        {**model.config, "tie_word_embeddings": False},
        weights,
        step=HistoryStep("untie", ""),
    )
    assert difference(model, move(model, "residual", seed)) <= ALLOWED
    assert difference(model, untied) >= FORBIDDEN
