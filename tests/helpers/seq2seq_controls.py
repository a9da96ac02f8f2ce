"""Forbidden elements of encoder-decoders: what one stack may not do without the other."""

import re
from dataclasses import replace
from functools import partial

from further_controls import rolled
from negative_controls import (
    SCALED_GATE,
    TORN_HEADS,
    AnySign,
    Control,
    kind_of,
    left_behind,
    loaded,
    move,
    moving,
    regroup,
    wrong_group,
)

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    Permutation,
    ScaledPermutation,
    SignedPermutation,
)


def own_order(layer):
    """The heads of one layer change places alone, though others have the same distances."""

    def forbidden(model):
        def moved(name):
            tensor = model.weights[name].clone()
            for piece in model.spec.pieces[name]:
                spaces = [kind_of(atom.space) for atom in piece.atoms]
                if "head" in spaces:
                    view = piece.view(tensor)
                    view.copy_(view.roll(1, spaces.index("head")))
            return tensor

        names = [name for name in model.spec.tensors if name.startswith(f"{layer}.SelfAttention")]
        assert len(names) == 4
        computed = {name: partial(moved, name) for name in names}
        return model.derive(DerivedWeights(model.weights, computed), step=model.history[-1])

    return Control(moving("head"), forbidden)


def one_stack(name, pattern):
    """The stream of one stack moves and that of the other stays: tensors of this pattern."""
    names = [tensor for tensor in loaded(name).spec.tensors if re.match(pattern, tensor)]
    return left_behind(*names)


CROSS = "decoder.block.1.layer.1.EncDecAttention"
ENCODER, NORM = "model.encoder", "model.decoder.layers.1.encoder_attn_layer_norm"


def decoder_moves_ones(model):
    """Any rotation of the decoder's stream, whose norms subtract the mean."""
    streams = ("residual.decoder",)
    spaces = {
        name: replace(old, group=Orthogonal(48)) if name in streams else old
        for name, old in model.spec.spaces.items()
    }
    return move(replace(model, spec=replace(model.spec, spaces=spaces)), "residual")


ONES = {"rotation that moves ones": Control(moving("residual"), decoder_moves_ones)}
SIGNS = {"signs on the stream": wrong_group("residual", SignedPermutation)}
GELU = {"signs on GELU": wrong_group("ff", SignedPermutation)}
STREAM = {
    "any matrix on the stream": wrong_group("residual", GeneralLinear),
    "scales on the stream": wrong_group("residual", ScaledPermutation),
}
DISTANCES = {"distances of other heads": rolled("relative_attention_bias.weight", "head", 1)}
GATE = {"scaled gate": SCALED_GATE}
# What a decoder alone is given is another model's: it may not move.
FOREIGN = Control(
    moving("ff"), lambda model: move(regroup(model, "encoded", Permutation), "encoded")
)

TWO_STACKS: dict[str, dict[str, Control]] = {
    "t5": {
        **STREAM,
        **DISTANCES,
        "heads of one layer in an order of their own": own_order("encoder.block.1.layer.0"),
        "heads of one decoder layer": own_order("decoder.block.1.layer.0"),
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "encoder rotated, decoder not": one_stack(
            "t5", r"decoder\.(?!.*EncDecAttention\.[kv])|lm_head"
        ),
        "decoder rotated, encoder not": one_stack("t5", r"encoder\.|.*EncDecAttention\.[kv]"),
        "keys of the encoder's output left behind": left_behind(f"{CROSS}.k.weight"),
        "values of the encoder's output left behind": left_behind(f"{CROSS}.v.weight"),
        "head left behind": left_behind("lm_head.weight"),
    },
    "t5-gated": {
        **STREAM,
        **DISTANCES,
        **GATE,
        "shared embedding left behind": left_behind("shared.weight"),
    },
    "bart": {
        **SIGNS,
        **GELU,
        "torn heads": TORN_HEADS,
        "encoder permuted, decoder not": one_stack(
            "bart", r"model\.decoder\.(?!.*encoder_attn\.[kv]_proj\.weight)"
        ),
        "positions of the encoder left behind": left_behind(f"{ENCODER}.embed_positions.weight"),
        "tied embedding left behind": left_behind("model.shared.weight"),
        "norm between attentions left behind": left_behind(f"{NORM}.weight"),
    },
    "bart-untied": {
        **SIGNS,
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "encoder's embedding left behind": left_behind(f"{ENCODER}.embed_tokens.weight"),
        "head left behind": left_behind("lm_head.weight"),
    },
    "bart-classifier": {
        **SIGNS,
        "scales on the tanh classifier": wrong_group("classifier", ScaledPermutation),
        "classifier left behind": left_behind("classification_head.dense.weight"),
    },
    "mbart": {
        **SIGNS,
        **GELU,
        "last norm of the encoder left behind": left_behind(f"{ENCODER}.layer_norm.weight"),
        "last shift of the decoder left behind": left_behind("model.decoder.layer_norm.bias"),
    },
    "whisper": {
        "signs on the streams": wrong_group("residual", SignedPermutation),
        **ONES,
        **GELU,
        "torn heads": TORN_HEADS,
        "signs on the filters": wrong_group("filter", SignedPermutation),
        "scales on the filters": wrong_group("filter", ScaledPermutation),
        "sinusoids left behind": left_behind(f"{ENCODER}.embed_positions.weight"),
        "second convolution left behind": left_behind(f"{ENCODER}.conv2.weight"),
        "values of the encoder's output left behind": left_behind(
            "model.decoder.layers.1.encoder_attn.v_proj.weight"
        ),
        "head left behind": left_behind("proj_out.weight"),
    },
    "whisper-untied": {
        **ONES,
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "shift before keys without a bias left behind": left_behind(
            "model.decoder.layers.0.self_attn_layer_norm.bias"
        ),
    },
    "t5-classifier": {
        **STREAM,
        **DISTANCES,
        "scales on the tanh classifier": wrong_group("classifier", ScaledPermutation),
        "classifier left behind": left_behind("classification_head.dense.weight"),
    },
    "t5-tokens": {**STREAM, **GATE, "head left behind": left_behind("classifier.weight")},
    "bart-decoder": {
        **SIGNS,
        **GELU,
        "tied embedding left behind": left_behind("model.decoder.embed_tokens.weight"),
        "foreign states permuted": FOREIGN,
    },
    "whisper-decoder": {
        **ONES,
        "head left behind": left_behind("proj_out.weight"),
        "foreign states permuted": FOREIGN,
    },
    "whisper-classifier": {
        "signs on the stream": SIGNS["signs on the stream"],
        "projector left behind": left_behind("projector.weight"),
        "labels left behind": left_behind("classifier.weight", space="projected"),
        "layers change their shares": rolled("layer_weights", "residual"),
    },
    "umt5": {**STREAM, **DISTANCES, **GATE, "head left behind": left_behind("lm_head.weight")},
}
