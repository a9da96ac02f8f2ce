"""What tests of activations share: inputs for a model of any family, and statistics of a pair on them."""

from dataclasses import replace

import torch

from symmerge.observation.calibration import pair_header
from symmerge.observation.gathering import gather
from symmerge.verification.modules import full_module


def inputs(model, batches=2, rows=32, length=32, seed=0):
    """Random tokens or random pictures."""
    generator = torch.Generator().manual_seed(seed)
    if "vocabulary" in model.spec.sizes:
        return [
            {
                "input_ids": torch.randint(
                    0, model.spec.sizes["vocabulary"], (rows, length), generator=generator
                )
            }
            for _ in range(batches)
        ]
    return [
        {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)} for _ in range(batches)
    ]


def seen(a, b, given, dtype=torch.float64, on=(), theirs=None):
    """Statistics of two models that are ready; B may see `theirs` instead."""
    modules = [full_module(model, dtype) for model in (a, b)]
    if theirs is not None:
        others = iter(_typed(theirs, dtype))
        modules[1].register_forward_pre_hook(
            lambda _, args, kwargs: (args, next(others)), with_kwargs=True
        )
    return gather(
        a.spec,
        tuple(modules),
        _typed(given, dtype),
        header=replace(pair_header(a, b), inputs=on),
        dtype=dtype,
    )


def _typed(given, dtype):
    return [
        {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in batch.items()
        }
        for batch in given
    ]
