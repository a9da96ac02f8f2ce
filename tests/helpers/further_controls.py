"""Forbidden elements of further families: for each of their symmetries, what is one too many."""

from dataclasses import replace
from functools import partial

import torch
from negative_controls import (
    QUERIES_ACROSS_GROUPS,
    SCALED_GATE,
    TIED_DECODER,
    TORN_HEADS,
    AnySign,
    Control,
    across_groups,
    edit,
    left_behind,
    move,
    moving,
    regroup,
    roll,
    shown_permuted,
    wrong_group,
    wrong_pairs,
)

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
    Trivial,
)
from symmerge.symmetry.notation import parse, unparse
from symmerge.symmetry.spec import Space

HEADS = {"torn heads": TORN_HEADS}
ACROSS = {"queries across groups": QUERIES_ACROSS_GROUPS}
GATE = {"scaled gate": SCALED_GATE}
SCALES = {"scales on the stream": wrong_group("residual", ScaledPermutation)}
ONES = {"rotation that moves ones": wrong_group("residual", Orthogonal)}
SIGNS = {"signs on the stream": wrong_group("residual", SignedPermutation)}
GELU = {"signs on GELU": wrong_group("ff", SignedPermutation)}
ANY_QK = {"any matrix on rotary QK": wrong_group("qk", GeneralLinear)}
WRONG_LAYOUT = {
    layout: wrong_group("qk", lambda size, layout=layout: RotaryPairs(size, size, layout))
    for layout in ("halves", "interleaved")
}


def move_heads(model):
    """Heads change places, as if no slope or number went with them."""
    return move(regroup(model, "head", Permutation), "head")


ALIBI = {"heads change slopes": Control(moving("qk"), move_heads)}


def only_without_positions(model):
    """All of the first layer's queries and keys may change their basis, as the second's may."""
    return move(regroup(model, "qk", GeneralLinear), "qk")


def rolled(end, space, axis=0):
    """Tensors of a space go to other places alone: a router, or numbers for each head."""

    def forbidden(model):
        computed = {
            name: partial(torch.roll, model.weights[name], 1, axis)
            for name in model.spec.tensors
            if name.endswith(end)
        }
        return replace(model, weights=DerivedWeights(model.weights, computed))

    return Control(moving(space), forbidden)


def only_moved(space, *names):
    """A space moves in these tensors alone."""

    def forbidden(model):
        moved = move(model, space)
        computed = {name: partial(moved.weights.__getitem__, name) for name in names}
        return replace(model, weights=DerivedWeights(model.weights, computed))

    return Control(moving(space), forbidden)


def experts_torn(model):
    """Units go to the next expert at one side only."""

    def change(view, spaces):
        if {"expert", "ff", "residual"} <= {*spaces} and spaces.index("residual") < spaces.index(
            "ff"
        ):
            return view.roll(1, spaces.index("expert"))
        return None

    return edit(model, change)


EXPERTS = {
    "router left behind": rolled("mlp.gate.weight", "expert"),
    "torn experts": Control(moving("expert"), experts_torn),
    **GATE,
}

# all heads share one rotary key, which no head takes along
LATENT = {
    **EXPERTS,
    "any matrix on the latents": wrong_group("latent", GeneralLinear),
    "any matrix on the shared key": wrong_group("rotary", GeneralLinear),
    "torn heads": Control(roll("head", "qk", "vo", "rotary"), roll("head", "qk", "vo")),
    "a latent's reader left behind": only_moved(
        "latent", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    ),
}

FIRST, SECOND, LAST = (f"residual.stage{number}" for number in (1, 2, 3))


def without_gains(model):
    """The first stream turns, and its gains stay where they are."""
    still = {
        name: parse(unparse(axes).replace(f"{FIRST}~", "still~"))
        for name, axes in model.spec.tensors.items()
    }
    spaces = {**model.spec.spaces, "still": Space("still", Trivial(model.spec.sizes[FIRST]))}
    loose = replace(model, spec=replace(model.spec, tensors=still, spaces=spaces))
    return move(regroup(loose, FIRST, OrthogonalFixingOnes), FIRST)


def neighbours_turned(model):
    """The four places that are merged come in another order."""
    name = "swin.encoder.layers.0.downsample.reduction.weight"
    turned = {name: lambda: model.weights[name].roll(model.spec.sizes[FIRST], 1)}
    return replace(model, weights=DerivedWeights(model.weights, turned))


TORN_STAGES = Control(roll("head", "qk", "vo", "distance"), roll("head", "vo", "distance"))
STAGES = {
    "signs on the first stream": wrong_group(FIRST, SignedPermutation),
    "rotation of the first stream": Control(moving(FIRST), without_gains),
    "rotation of the second stream that moves ones": wrong_group(SECOND, Orthogonal),
    "any matrix on the second stream": wrong_group(SECOND, GeneralLinear),
    "neighbours in another order": Control(moving(FIRST), neighbours_turned),
    "merging left behind": left_behind(
        "swin.encoder.layers.1.downsample.reduction.weight", space=SECOND
    ),
    "distances of other heads": rolled("relative_position_bias_table", "head", 1),
}

SHOWN = {"order of a stream that is shown": Control(moving("ff"), shown_permuted)}
IMAGES = {
    **SIGNS,
    "gain before the layers left behind": left_behind("vision_model.pre_layrnorm.weight"),
}

FURTHER: dict[str, dict[str, Control]] = {
    "gemma2": {**SCALES, **ANY_QK, **HEADS, **GATE, **ACROSS},
    "gemma3": {
        **SCALES,
        "signs inside rotary pairs": wrong_pairs(Signs),
        **GATE,
        **ACROSS,
    },
    "smollm3": {
        **SCALES,
        "any matrix where positions turn": Control(moving("qk"), only_without_positions),
        **HEADS,
    },
    "cohere": {**ONES, "pairs in halves": WRONG_LAYOUT["halves"], **GATE, **ACROSS},
    "cohere2": {
        **ONES,
        "any matrix where positions turn": Control(moving("qk"), only_without_positions),
        "output bias left behind": left_behind("model.layers.0.self_attn.o_proj.bias"),
    },
    "gptj": {**ONES, **GELU, **ANY_QK, **HEADS},
    "gpt_neo": {
        **ONES,
        **GELU,
        **HEADS,
        "positions left behind": left_behind("transformer.wpe.weight"),
    },
    "phi": {**ONES, **GELU, **ANY_QK, **ACROSS},
    "falcon": {
        **ONES,
        **ANY_QK,
        "interleaved pairs": WRONG_LAYOUT["interleaved"],
        **ACROSS,
    },
    "falcon-alibi": {**ONES, **GELU, **ALIBI},
    "bloom": {
        **ONES,
        **ALIBI,
        **GELU,
        "embedding left behind": left_behind("transformer.word_embeddings.weight"),
    },
    "mpt": {**ONES, **ALIBI, **GELU, "head left behind": left_behind("lm_head.weight")},
    "mixtral": {**SCALES, **ANY_QK, **EXPERTS},
    "gpt_oss": {
        **SCALES,
        **ANY_QK,
        # a sink has no place inside its head
        "torn heads": Control(roll("head", "qk", "vo", "query"), roll("head", "vo")),
        "queries across groups": Control(roll("query", "qk", "vo", "head"), across_groups),
        "scales of limited units": wrong_group("ff", ScaledPermutation),
        "sinks of other heads": rolled("self_attn.sinks", "head"),
        "router left behind": rolled("mlp.router.weight", "expert"),
        "torn experts": EXPERTS["torn experts"],
    },
    "qwen2_moe": {
        **EXPERTS,
        "shared expert's gate left behind": left_behind(
            "model.layers.0.mlp.shared_expert_gate.weight"
        ),
    },
    "qwen3_moe": {**SCALES, "signs inside rotary pairs": wrong_pairs(Signs), **EXPERTS},
    "olmoe": {**SCALES, "permutation of pairs": wrong_group("qk", Permutation), **EXPERTS},
    "deepseek_v3": {
        **SCALES,
        **LATENT,
        "pairs in halves": wrong_group("rotary", lambda size: RotaryPairs(size, size)),
        "choice left behind": rolled("e_score_correction_bias", "expert"),
    },
    "camembert": {**SIGNS, **GELU, **HEADS},
    "electra": {**SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "electra-detector": {
        **SIGNS,
        "rotation of the embedding that moves ones": wrong_group("embedding", Orthogonal),
        "signs on the GELU detector": wrong_group("detector", SignedPermutation),
    },
    "mpnet": {
        **SIGNS,
        **GELU,
        "distances of other heads": rolled("relative_attention_bias.weight", "head", 1),
    },
    "deberta-v2": {
        **SIGNS,
        **GELU,
        **HEADS,
        **TIED_DECODER,
        "distances left behind": left_behind("deberta.encoder.rel_embeddings.weight"),
    },
    "deberta-v2-classifier": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "scales on the tanh pooler": wrong_group("pooled", ScaledPermutation),
        "convolution left behind": left_behind("deberta.encoder.conv.conv.weight"),
        "distances moved alone": only_moved("relative", "deberta.encoder.rel_embeddings.weight"),
    },
    "albert": {
        **SIGNS,
        **HEADS,
        "rotation of the tied embedding that moves ones": wrong_group("embedding", Orthogonal),
    },
    "albert-classifier": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "scales on the tanh pooler": wrong_group("pooled", ScaledPermutation),
        "mapping left behind": left_behind("albert.encoder.embedding_hidden_mapping_in.weight"),
    },
    "deit": {
        **ONES,
        **GELU,
        **HEADS,
        "distillation token left behind": left_behind("deit.embeddings.distillation_token"),
    },
    "deit-teacher": {
        "one head left behind": left_behind("distillation_classifier.weight"),
    },
    "vit_mae": {
        **ONES,
        **GELU,
        **HEADS,
        "what stands for hidden patches left behind": left_behind("decoder.mask_token"),
        "prediction left behind": left_behind("decoder.decoder_pred.weight"),
    },
    "ijepa": {
        **ONES,
        **GELU,
        **HEADS,
        "positions left behind": left_behind("ijepa.embeddings.position_embeddings"),
    },
    "ijepa-relu": {"signs on ReLU": wrong_group("ff", SignedPermutation)},
    "beit": {
        **ONES,
        **GELU,
        "distances of other heads": rolled("relative_position_bias_table", "head", 1),
    },
    "swin": {
        **STAGES,
        **GELU,
        "torn heads": TORN_STAGES,
        "rotation of the last stream that moves ones": wrong_group(LAST, Orthogonal),
        "classifier left behind": left_behind("classifier.weight", space=LAST),
    },
    "swin-padded": STAGES,
    "swin-positions": {
        "signs on ReLU": wrong_group("ff", SignedPermutation),
        "positions left behind": left_behind("swin.embeddings.position_embeddings", space=FIRST),
        "rotation of the last stream that moves ones": wrong_group(SECOND, Orthogonal),
    },
    "swin-features": {
        "signs on the first stream": STAGES["signs on the first stream"],
        "rotation of the second stream that moves ones": wrong_group(SECOND, Orthogonal),
        **SHOWN,
        "torn heads": TORN_STAGES,
    },
    "dinov2": {**ONES, **GELU, "both means left behind": left_behind("classifier.weight")},
    "dinov2_with_registers": {
        **ONES,
        **GATE,
        "registers left behind": left_behind("dinov2_with_registers.embeddings.register_tokens"),
    },
    "clip": {
        **IMAGES,
        **HEADS,
        "any matrix on the joint space": wrong_group("joint", GeneralLinear),
        "one projection moved alone": only_moved("joint", "text_projection.weight"),
        "negative scales on ReLU": wrong_group("ff", AnySign),
    },
    "clip-classifier": {
        **IMAGES,
        **GELU,
        "classifier left behind": left_behind("classifier.weight"),
    },
    "clip_text_model": {
        **ONES,
        **HEADS,
        "projection left behind": left_behind("text_projection.weight"),
    },
    "clip_vision_model": {
        **IMAGES,
        **GELU,
        "class token left behind": left_behind("vision_model.embeddings.class_embedding"),
    },
    **{
        f"{name}-features": {**SHOWN, **GELU, **HEADS}
        for name in ("vit_mae", "clip-text", "clip-image", "deberta-v2")
    },
    "siglip": {
        **ONES,
        **HEADS,
        "rotation of the joint space that moves ones": wrong_group("joint", Orthogonal),
        "one head moved alone": only_moved("joint", "text_model.head.weight"),
        "signs on the pooling head's units": wrong_group("units", SignedPermutation),
        "the probe's queries left behind": only_moved(
            "qk", "vision_model.head.attention.in_proj_weight"
        ),
    },
    "siglip-classifier": {
        **ONES,
        **GELU,
        "classifier left behind": left_behind("classifier.weight"),
    },
    "siglip_text_model": {**SHOWN, **GELU, **HEADS},
    "siglip_vision_model": {
        **SHOWN,
        **GELU,
        **HEADS,
        "signs on the pooling head's units": wrong_group("units", SignedPermutation),
    },
}
