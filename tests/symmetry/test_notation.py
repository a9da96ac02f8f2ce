"""The notation: what parses, what is refused, and that pieces cut a tensor without loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symmerge.errors import NotationError
from symmerge.symmetry.notation import Atom, Product, Role, Sum, atoms, parse, pieces, size, unparse

pytestmark = pytest.mark.quick

SIZES = {"a": 1, "b": 2, "c": 3, "h": 2, "qk": 3, "vo": 4, "d": 5}
a, b = Atom("a", Role.WRITES), Atom("b", Role.WRITES)
b_reads, c_rides = Atom("b", Role.READS), Atom("c", Role.RIDES)

PARSED = {
    "a": (Product((a,)),),
    "a b* c~": (Product((a,)), Product((b_reads,)), Product((c_rides,))),
    "(a b)": (Product((a, b)),),
    "(a (b a))": (Product((a, b, a)),),  # a product in a product is one product
    "((a))": (Product((a,)),),
    "(a + b*)": (Product((Sum((Product((a,)), Product((b_reads,)))),)),),
    "(a (b + b*)) c~": (
        Product((a, Sum((Product((b,)), Product((b_reads,)))))),
        Product((c_rides,)),
    ),
    "((a b) + c~)": (Product((Sum((Product((a, b)), Product((c_rides,)))),)),),
    " (a b)a ": (Product((a, b)), Product((a,))),
    "ff.3*": (Product((Atom("ff.3", Role.READS),)),),
    "()": (),  # a number
    "patch_height": (Product((Atom("patch_height", Role.WRITES),)),),
}

REFUSED = {
    "": "no axis in ''",
    "  ": "no axis",
    "(a b": r"'\(' is never closed in '\(a b'",
    "((a b) + c": "never closed",
    "a b)": r"unexpected '\)' in 'a b\)'",
    "a + b": r"unexpected '\+'",
    "(a +)": "an empty block",
    "(+ a)": "an empty block",
    "(a + + b)": "an empty block",
    "a, b": r"cannot read ', b' in 'a, b'",
    "a**": r"cannot read '\*'",
    "a *": r"cannot read '\*'",
    "3a": "cannot read '3a'",
}

LENGTHS = {
    "d": 5,
    "d*": 5,
    "(h qk)": 6,
    "(qk + vo)": 7,
    "(h (qk + qk* + vo))": 20,
    "((h qk) + (h qk*) + (h vo))": 20,
    "((a + b) (c + h))": 15,
}


@pytest.mark.parametrize("line", PARSED)
def test_parse(line):
    assert parse(line) == PARSED[line]


@pytest.mark.parametrize("line", REFUSED)
def test_bad_lines_are_refused_with_a_reason(line):
    with pytest.raises(NotationError, match=REFUSED[line]):
        parse(line)


def test_atoms_come_in_order():
    assert " ".join(map(str, atoms(parse("((h qk) + (h vo*)) d~")))) == "h qk h vo* d~"


@pytest.mark.parametrize("line", LENGTHS)
def test_size(line):
    assert size(parse(line)[0], SIZES) == LENGTHS[line]


@st.composite
def lines(draw) -> str:
    """A tensor of one to three axes: atoms, products, and sums, also inside products."""
    atom = st.builds(str.__add__, st.sampled_from(sorted(SIZES)), st.sampled_from(["", "*", "~"]))
    product = st.lists(atom, min_size=1, max_size=2).map(lambda names: f"({' '.join(names)})")
    block = st.lists(product, min_size=2, max_size=3).map(lambda terms: f"({' + '.join(terms)})")
    axis = st.lists(st.one_of(atom, block), min_size=1, max_size=2).map(
        lambda factors: f"({' '.join(factors)})"
    )
    return " ".join(draw(st.lists(axis, min_size=1, max_size=3)))


def numbered(axes) -> torch.Tensor:
    """A tensor of the right shape whose entries are their own positions."""
    shape = [size(axis, SIZES) for axis in axes]
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("line", PARSED)
def test_round_trip_of_written_lines(line):
    assert parse(unparse(parse(line))) == parse(line)


@settings(max_examples=100, deadline=None)
@given(lines())
def test_round_trip(line):
    axes = parse(line)
    assert parse(unparse(axes)) == axes
    assert unparse(parse(unparse(axes))) == unparse(axes)


def test_unparse_gives_the_shortest_form():
    assert unparse(parse("((h  (qk)) + (h vo*))d~")) == "((h qk) + (h vo*)) d~"
    assert unparse(parse("a b")) != unparse(parse("(a b)"))  # two axes are not one


@settings(max_examples=60, deadline=None)
@given(lines(), st.booleans())
def test_pieces_cover_every_entry_once(line, transposed):
    axes = parse(line)
    tensor = numbered(axes)
    if transposed:  # the same numbers in another memory layout
        reverse = range(tensor.ndim)[::-1]
        tensor = tensor.permute(*reverse).contiguous().permute(*reverse)
    cut = pieces("t", axes, SIZES)
    views = [piece.view(tensor) for piece in cut]
    entries = torch.cat([view.flatten() for view in views]).sort().values
    assert entries.equal(torch.arange(tensor.numel()))
    for piece, view in zip(cut, views, strict=True):
        assert list(view.shape) == [SIZES[atom.space] for atom in piece.atoms]
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_missing_piece_is_noticed():
    """Negative control: without one of its pieces a fused tensor is not covered."""
    axes = parse("(h (qk + vo)) d")
    tensor = numbered(axes)
    covered = torch.cat([piece.view(tensor).flatten() for piece in pieces("t", axes, SIZES)[1:]])
    assert len(covered) < tensor.numel()


def test_a_view_shares_memory():
    tensor = torch.zeros(20, 5)
    keys = pieces("qkv", parse("(h (qk + qk* + vo)) d"), SIZES)[1]
    keys.view(tensor).fill_(1)
    assert tensor.sum() == 2 * 3 * 5
    assert tensor[3:6].all() and tensor[13:16].all()


# Where the entry of head i, coordinate j lies along a fused axis, for the two layouts in use.
FUSED = {
    "((h qk) + (h qk*) + (h vo))": [
        lambda i, j: 3 * i + j,
        lambda i, j: 6 + 3 * i + j,
        lambda i, j: 12 + 4 * i + j,
    ],
    "(h (qk + qk* + vo))": [
        lambda i, j: 10 * i + j,
        lambda i, j: 10 * i + 3 + j,
        lambda i, j: 10 * i + 6 + j,
    ],
}


@pytest.mark.parametrize("line", FUSED)
def test_fused_layouts(line):
    tensor = torch.arange(20)
    for piece, place in zip(pieces("qkv", parse(line), SIZES), FUSED[line], strict=True):
        view = piece.view(tensor)
        assert view.tolist() == [
            [place(i, j) for j in range(view.shape[1])] for i in range(view.shape[0])
        ]


def test_positions_of_a_space():
    (piece,) = pieces("w", parse("(h qk) d* h~"), SIZES)
    positions = {space: list(piece.positions(space)) for space in ("h", "qk", "d", "vo")}
    assert positions == {"h": [0, 3], "qk": [1], "d": [2], "vo": []}


def test_a_sum_inside_a_sum_is_refused():
    with pytest.raises(NotationError, match="fused: a sum inside a sum"):
        pieces("fused", parse("((a + b) + c)"), SIZES)
