"""Random inputs for a model of any family, and statistics of a pair on them."""

from dataclasses import replace

import torch

from symmerge.models.tables import has_decoder
from symmerge.observation.calibration import pair_header
from symmerge.observation.gathering import gather
from symmerge.verification.inputs import sequence_length
from symmerge.verification.modules import full_module


def inputs(model, count=2, rows=32, length=32, seed=0):
    """Random tokens, random images, or both."""
    generator = torch.Generator().manual_seed(seed)

    def tokens():
        vocabulary, longest = model.spec.sizes["vocabulary"], sequence_length(model)
        return torch.randint(0, vocabulary, (rows, min(length, longest)), generator=generator)

    def images():
        return torch.randn(rows, 3, 16, 16, generator=generator)

    makers = {"vocabulary": ("input_ids", tokens), "channel": ("pixel_values", images)}
    used = [made for space, made in makers.items() if space in model.spec.sizes]
    if has_decoder(model):
        used.append(("decoder_input_ids", tokens))
    return [{key: make() for key, make in used} for _ in range(count)]


def pair_statistics(a, b, batches, dtype=torch.float64, inputs=(), theirs=None):
    """Statistics of two models in canonical form; B may get the batches of `theirs` instead."""
    modules = [full_module(model, dtype) for model in (a, b)]
    if theirs is not None:
        others = iter(_typed(theirs, dtype))
        modules[1].register_forward_pre_hook(
            lambda _, args, kwargs: (args, next(others)), with_kwargs=True
        )
    header = replace(pair_header(a, b), inputs=inputs)
    return gather(a.spec, tuple(modules), _typed(batches, dtype), header=header, dtype=dtype)


def _typed(batches, dtype):
    return [
        {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in batch.items()
        }
        for batch in batches
    ]
