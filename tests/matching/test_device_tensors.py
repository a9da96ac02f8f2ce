"""Tensors of a solver on a device: the same values, read once, as many as fit."""

import pytest
import torch

from symmerge.checkpoints.weights import MemoryWeights, Weights
from symmerge.matching.device_tensors import DeviceTensors, to_solver
from symmerge.symmetry.threads import same_bytes

NAMES = [f"tensor-{number}" for number in range(6)]


class Counting(Weights):
    """Weights that count how often each tensor is read."""

    def __init__(self):
        values = {name: torch.full((4, 5), float(at)) for at, name in enumerate(NAMES)}
        self.base, self.read = MemoryWeights(values), []

    def names(self):
        return self.base.names()

    def shape(self, name):
        return self.base.shape(name)

    def dtype(self, name):
        return self.base.dtype(name)

    def __getitem__(self, name):
        self.read.append(name)
        return self.base[name]


@pytest.mark.parametrize("inside", [True, False], ids=["by workers", "alone"])
def test_what_fits_is_read_once_and_the_rest_each_time(inside):
    weights, room = Counting(), 4 * 20 * 8  # four of six in float64
    if inside:
        with same_bytes():
            tensors = DeviceTensors(weights, "cpu", torch.float64, room)
    else:
        tensors = DeviceTensors(weights, "cpu", torch.float64, room)
    assert sorted(weights.read) == NAMES[:4]
    for _ in range(2):
        for at, name in enumerate(NAMES):
            assert tensors[name].dtype == torch.float64
            assert torch.equal(tensors[name], torch.full((4, 5), float(at)).double())
    assert [weights.read.count(name) for name in NAMES] == [1, 1, 1, 1, 4, 4]
    assert list(tensors) == NAMES and len(tensors) == 6


def test_a_processor_reads_tensors_where_they_are():
    pair = Counting(), Counting()
    assert to_solver(pair, "cpu", torch.float32) == pair and not pair[0].read


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_them_before_the_first_use():
    first, _ = to_solver((Counting(), Counting()), "cuda", torch.float32)
    assert first[NAMES[3]].is_cuda and first[NAMES[3]] is first[NAMES[3]]
