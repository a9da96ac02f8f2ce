"""Modules that cannot be followed: what stands in the way is said, and nothing is guessed."""

import pytest
import torch
from custom_modules import Units
from torch.nn.utils import prune

import symmerge as sm
from symmerge.derivation.stock import derive_stock
from symmerge.errors import UnsupportedModel


class Broken(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        return self.how(self.inner(x), x)


def written_into(y, x):
    y[:, 0] = 0
    return y


def whole_after_part(y, x):
    y[:, :2].relu_()
    return y * 2


def half_by_half(y, x):
    first, second = y.chunk(2, -1)
    return torch.cat([first.relu_(), second], -1)


def fails(y, x):
    raise ValueError("no such shape")


BAD = {
    "branch on values": (lambda y, x: y if y.sum() > 0 else -y, "_local_scalar_dense|is_nonzero"),
    "branch on inputs": (lambda y, x: y.relu() if x[0, 0] == 1 else y.tanh(), "for one input"),
    "writes into a part": (written_into, "writes into a part|torch.cat"),
    "reads what it wrote into": (whole_after_part, "relu_ in its forward writes into a part"),
    "fails": (fails, "cannot be traced.*no such shape"),
    "random": (lambda y, x: y + torch.randn(4), "other outputs the second time"),
    "no numbers": (lambda y, x: (y - 1e9).log(), "not finite"),
    "no floats": (lambda y, x: torch.ones(2, dtype=torch.int64), "no output"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_module_that_cannot_be_traced_says_why(case):
    how, message = BAD[case]
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(UnsupportedModel, match=message):
        sm.derive(Broken(how), x)


def test_a_half_may_be_written_into_where_nobody_reads_the_whole():
    assert sm.derive(Broken(half_by_half), torch.randn(2, 4)).together == 0


def test_parameters_that_share_a_part_of_their_memory_are_refused():
    module = Broken(lambda y, x: y)
    whole = torch.randn(5, 4)
    module.inner.weight = torch.nn.Parameter(whole[:4])
    module.other = torch.nn.Parameter(whole[1:])
    with pytest.raises(UnsupportedModel, match="share a part"):
        sm.derive(module, torch.randn(2, 4))


def without_shape():
    return torch.nn.LazyLinear(3)


def compiled():
    return torch.jit.trace(torch.nn.Linear(4, 3), torch.randn(2, 4))


def complex_numbers():
    return torch.nn.Linear(4, 3, dtype=torch.complex64)


def pruned():
    return prune.l1_unstructured(torch.nn.Linear(4, 3), "weight", 0.5)


UNFIT = {
    without_shape: "run the module once",
    compiled: "give the module that it was made from",
    complex_numbers: "view_as_complex",
    pruned: "cannot be copied.*remove",
}


@pytest.mark.parametrize("made", UNFIT, ids=lambda made: made.__name__)
def test_a_module_that_cannot_be_copied_in_float64_is_refused_with_a_remedy(made):
    with pytest.raises(UnsupportedModel, match=UNFIT[made]):
        sm.derive(made(), torch.randn(2, 4))


def test_inputs_without_a_tensor_are_refused():
    with pytest.raises(UnsupportedModel, match="no tensor"):
        sm.derive(Broken(lambda y, x: y), "digits")


def test_what_leaves_no_trace_is_noticed():
    left = sm.derive(Units(lambda x: torch.from_numpy(x.numpy() * 2)), torch.randn(6, 5))
    stayed = sm.derive(Units(lambda x: x * 2), torch.randn(6, 5))
    assert not left.spec.hidden and stayed.spec.hidden
    names = {note.partition(" ")[0] for note in left.notes if "no trace" in note}
    assert names == {"first.weight", "first.bias"}
    assert not any("no trace" in note for note in stayed.notes)


def test_a_stock_class_whose_inputs_are_not_made_here_is_refused_with_a_remedy():
    with pytest.raises(UnsupportedModel, match=r"input_values cannot be made.*sm\.derive"):
        derive_stock("Wav2Vec2ForCTC")
