"""What two models are run on: inputs that reach every row, position, token type and channel.

Running every token of a large vocabulary through all layers would take hours. Few tokens take that
way; every row of every embedding is compared on the model without its layers, which a symmetry
preserves as well: the embeddings, the last norm and the head act on the same stream. (That norm
then keeps the length of what it reads.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from symmerge.families.base import pair
from symmerge.models.model import Model
from symmerge.models.settings import setting
from symmerge.models.tables import has_decoder

SOUNDS = 16  # of an encoder with one output for each: it hears half a minute at a time
TOKENS, LONGEST = 1024, 4608  # through all layers; a window of 4096 fits
SHORT, SEQUENCES, IMAGES = 48, 64, 32
FRAMES = 2  # of sound in each place of an encoder that hears
BRIEF = 16  # tokens of many sequences, and for the gate
PROJECTED = 64  # output rows that are looked at where every input row is
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size")
WINDOWS += ("relative_attention_max_distance",)  # T5's distances count to here
POSITIONS_KEPT = 128  # of a sequence: a large vocabulary has more logits than memory
LARGE_VOCABULARY = 1024
# Tasks with a few scores for a sequence.
OF_SEQUENCES = ("text-classification", "next-sentence-prediction")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Inputs, and what to run on them.

    Without `layers`, the model is run without its layers. `outputs` are the vocabulary rows whose
    logits are compared (None: all), `positions` the places (None: all). Which experts a token takes
    may hang on a rounding, which then changes all of its logits: `every_expert` gives it all of
    them, and where it has its own, only the `typical` place is judged.
    `beside` are inputs that every batch of the others gets whole.
    """

    inputs: dict[str, Tensor]
    what: str
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    layers: bool = True
    outputs: Tensor | None = None
    positions: Tensor | None = None
    every_expert: bool = False
    typical: bool = False

    def to(self, device: torch.device) -> Sample:
        """The same inputs on a device."""
        return replace(self, inputs={name: value.to(device) for name, value in self.inputs.items()})


def samples(model: Model, seed: int, *, long: bool = True) -> list[Sample]:
    """What to run a model on, the same for the same seed.

    Not `long`: few and short sequences through all layers, for the gate, which also compares
    tensors. Every row is reached either way.
    """
    generator = torch.Generator().manual_seed(seed)
    if "channel" in model.spec.sizes:
        images = _images(model, generator, IMAGES if long else IMAGES // 2)
        if "vocabulary" not in model.spec.sizes:
            return [images]
        return [_beside(images, sample) for sample in samples_of_texts(model, generator, long)]
    if hears(model) and "vocabulary" not in model.spec.sizes:
        sound = _contrasts(SOUNDS if long else SOUNDS // 2, _sound(model), generator)
        return [Sample(inputs={"input_features": sound}, what=f"{_size(sound)} random sounds")]
    return samples_of_texts(model, generator, long)


def samples_of_texts(model: Model, generator: torch.Generator, long: bool) -> list[Sample]:
    """Sequences through all layers, and every row of the embeddings."""
    sequences = _sequences(model, generator, long)
    if routes(model):
        sequences = [kind for sample in sequences for kind in _of_experts(sample)]
    return [*sequences, *_rows(model, generator)]


def routes(model: Model) -> bool:
    """Whether tokens take different ways, to the experts that a router chooses."""
    return any(name.startswith("expert.") for name in model.spec.spaces)


def _of_experts(sample: Sample) -> tuple[Sample, Sample]:
    every = replace(sample, every_expert=True, what=f"{sample.what} through all experts")
    return every, replace(sample, typical=True)


def _beside(images: Sample, texts: Sample) -> Sample:
    """Texts with images: together through all layers, else the same images with all texts."""
    what = f"{texts.what} with {images.what}"
    if texts.layers:
        return replace(texts, inputs={**texts.inputs, **images.inputs}, what=what)
    return replace(texts, beside=images.inputs, what=what)


def image_shape(model: Model) -> tuple[int, int, int]:
    """Channels, height and width of a model's images."""
    return model.spec.sizes["channel"], *pair(setting(model.config, "image_size", 224))


def _images(model: Model, generator: torch.Generator, count: int) -> Sample:
    """Noise of all contrasts on all colours: images that look alike have outputs that do."""
    pixels = _contrasts(count, image_shape(model), generator)
    inputs = {"pixel_values": pixels}
    if model.spec.noise:
        inputs["noise"] = torch.rand((count, model.spec.noise), generator=generator)
    return Sample(inputs=inputs, what=f"{_size(pixels)} random pixels")


def _contrasts(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Noise of all contrasts, and a colour for each channel."""
    channels, *sides = shape
    colours = torch.randn((count, channels, *(1 for _ in sides)), generator=generator)
    contrasts = torch.logspace(-1, 0.5, count).reshape(-1, *(1 for _ in shape))
    return colours + contrasts * torch.randn((count, *shape), generator=generator)


def _sequences(model: Model, generator: torch.Generator, long: bool) -> Iterator[Sample]:
    """Random tokens through all layers, in sequences as long as the model's windows need."""
    vocabulary, length = model.spec.sizes["vocabulary"], sequence_length(model)
    if pools(model):  # one output for each sequence: many, or rounding cannot be told
        yield _tokens(model, generator, SEQUENCES, min(BRIEF, length))
        if length > BRIEF and (long or has_decoder(model)):
            yield _tokens(model, generator, 2, length)
        return
    # Nothing but layers shows an encoder's positions, and an embedding of its own.
    brief = not long and not (has_decoder(model) and "position" in model.spec.sizes)
    length = min(length, BRIEF) if brief else length
    tokens = vocabulary if _own_embedding(model) else min(vocabulary, TOKENS)
    count = -(-tokens // length) if long or _own_embedding(model) else 1
    yield _tokens(model, generator, max(2, count) if long else count, length)


def _own_embedding(model: Model) -> bool:
    """Whether an encoder's embedding is not the decoder's."""
    return any(name.endswith("encoder.embed_tokens.weight") for name in model.spec.tensors)


def random_texts(model: Model, count: int, seed: int) -> Tensor:
    """Short texts of random tokens, with the end where the model looks for it."""
    length = min(BRIEF, sequence_length(model))
    generator = torch.Generator().manual_seed(seed)
    return _tokens(model, generator, count, length).inputs["input_ids"]


def _tokens(model: Model, generator: torch.Generator, count: int, length: int) -> Sample:
    """Sequences without the padding token, in which each token comes up before any repeats."""
    usable = _usable(model)
    needed = count * length
    rounds = -(-needed // len(usable))
    order = [torch.randperm(len(usable), generator=generator) for _ in range(rounds)]
    ids = usable[torch.cat(order)[:needed]].reshape(count, length)
    if model.spec.end_token is not None:
        ids[:, -1] = model.spec.end_token
    large = has_many_outputs(model)
    kept = max(1, POSITIONS_KEPT // count)
    places = torch.linspace(0, length - 1, kept).long() if large and length > kept else None
    inputs = _given(model, ids, generator)
    return Sample(inputs=inputs, what=f"{_size(ids)} random tokens", positions=places)


def _rows(model: Model, generator: torch.Generator) -> Iterator[Sample]:
    """Every row of the embeddings, for the model without its layers."""
    vocabulary = model.spec.sizes["vocabulary"]
    outputs = None
    if vocabulary > PROJECTED:
        outputs = torch.randperm(vocabulary, generator=generator)[:PROJECTED]
    each = _each(model)
    what = f"all {vocabulary} tokens without layers"
    # The padding token is one of them: the mask says that nothing here is padding.
    inputs = {"input_ids": each}
    if pools(model):
        inputs["attention_mask"] = torch.ones_like(each)
    elif has_decoder(model):
        inputs = {"decoder_input_ids": each, **_unheard(model, each)}
    yield Sample(inputs=inputs, what=what, layers=False, outputs=outputs)
    if "position" in model.spec.sizes and not pools(model):
        usable = _usable(model)
        ids = usable[torch.randint(len(usable), (2, positions(model)), generator=generator)]
        inputs = _given(model, ids, generator, heard=False)
        what = f"all {ids.shape[1]} positions without layers"
        yield Sample(inputs=inputs, what=what, layers=False, outputs=outputs)


def _each(model: Model) -> Tensor:
    """Each token by itself, or before the last one that a classifier looks for."""
    tokens, last = torch.arange(model.spec.sizes["vocabulary"]), model.spec.end_token
    if last is None or not has_decoder(model):
        return tokens[:, None]
    tokens = tokens[tokens != last]
    return torch.stack([tokens, torch.full_like(tokens, last)], 1)


def pools(model: Model) -> bool:
    """Whether a model has one output for a sequence, not one for each token."""
    return model.spec.task in (*OF_SEQUENCES, "text-embedding", "image-text")


def has_few_outputs(model: Model) -> bool:
    """Whether a model has nothing but a few class scores for a sequence or an image."""
    return model.spec.task in (*OF_SEQUENCES, "image-classification", "audio-classification")


def has_many_outputs(model: Model) -> bool:
    """Whether a model has thousands of logits for each token."""
    return model.spec.sizes.get("vocabulary", 0) > LARGE_VOCABULARY and not pools(model)


def longest_input(model: Model) -> str | None:
    """The images or the tokens that its learned positions fit; None: any."""
    if "position" not in model.spec.sizes:
        return None
    if "channel" in model.spec.sizes and "vocabulary" not in model.spec.sizes:
        return "{1}x{2} pixels".format(*image_shape(model))
    return f"{positions(model)} tokens"


def positions(model: Model) -> int:
    """How many learned positions a sequence can reach."""
    return model.spec.sizes["position"] - model.spec.reserved_positions


def sequence_length(model: Model) -> int:
    """All learned positions, or longer than every window, as far as the model can read."""
    if "position" in model.spec.sizes:
        return positions(model)
    windows = [setting(model.config, name) for name in WINDOWS]
    widest = max((width for width in windows if isinstance(width, int)), default=0)
    most = setting(model.config, "max_position_embeddings")
    if "distance" in model.spec.sizes and isinstance(most, int):
        return min(LONGEST, most)
    return min(LONGEST, max(SHORT, widest + SHORT), most if isinstance(most, int) else LONGEST)


def _usable(model: Model) -> Tensor:
    """All tokens but the padding, from which some models compute positions, and the last."""
    tokens = torch.arange(model.spec.sizes["vocabulary"])
    if len(tokens) == 1:
        return tokens
    for special in (setting(model.config, "pad_token_id"), model.spec.end_token):
        tokens = tokens if special is None else tokens[tokens != special]
    return tokens


def _types(model: Model, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    types = model.spec.sizes.get("type", 1)
    if types == 1:
        return {}
    return {"token_type_ids": torch.randint(types, ids.shape, generator=generator)}


def _given(
    model: Model, ids: Tensor, generator: torch.Generator, *, heard: bool = True
) -> dict[str, Tensor]:
    """Tokens as a model takes them; an encoder reads others, in another order, or hears noise."""
    if not has_decoder(model) or pools(model):  # a classifier gives its decoder the same
        encoded = _encoded(model, len(ids), generator) if heard else {}
        return {"input_ids": ids, **_types(model, ids, generator), **encoded}
    if not hears(model):
        order = torch.randperm(ids.numel(), generator=generator)
        return {"input_ids": ids, "decoder_input_ids": ids.flatten()[order].view_as(ids)}
    if not heard:
        return {"decoder_input_ids": ids, **_unheard(model, ids)}
    sound = torch.randn((len(ids), *_sound(model)), generator=generator)
    return {"decoder_input_ids": ids, "input_features": sound}


def _sound(model: Model) -> tuple[int, int]:
    """Channels and length of what an encoder hears."""
    return model.spec.sizes["mel"], FRAMES * model.spec.sizes["frame"]


def _encoded(model: Model, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What a decoder without an encoder is given in its place: noise."""
    name, width = model.spec.encoded_as, model.spec.sizes.get("encoded", 0)
    return {name: torch.randn((count, BRIEF, width), generator=generator)} if name else {}


def _unheard(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """What an encoder is given where its layers are left out, and no decoder reads it."""
    return {"input_features": torch.zeros(len(ids), 1, 1)} if hears(model) else {"input_ids": ids}


def hears(model: Model) -> bool:
    """Whether an encoder reads sound."""
    return "mel" in model.spec.sizes


def _size(tensor: Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape)
