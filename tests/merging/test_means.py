"""Means of two models: another t for parts, attention by factors or circuits, the card."""

import json

import pytest
import torch

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.models.interpolation import piece_time
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of

FAMILIES = ["bert", "gpt2", "vit", "llama", "neox"]


@pytest.fixture(scope="module", params=FAMILIES)
def aligned(request):
    a, b = (sm.load(small_model(request.param, seed=seed, dtype=torch.float64)) for seed in (0, 1))
    return a, b, sm.align(a, b, sm.WeightMatching(generate_text=False, dtype=torch.float64))


def difference(model, other):
    sample = samples(model, 0)[0]
    x, y = (logits_of(which, sample, dtype=torch.float64)["logits"] for which in (model, other))
    x, y = (logits - logits.mean(-1, keepdim=True) for logits in (x, y))
    return ((x - y).norm() / x.norm()).item()


@pytest.mark.parametrize("attention", ["factors", "svd", "circuits"])
def test_the_ends_are_the_parents(aligned, attention):
    a, b, found = aligned
    if attention == "circuits" and a.spec.family in ("llama", "neox"):
        with pytest.raises(MismatchError, match="turn with their positions"):
            sm.average(found.reference, found.aligned, 0.0, attention=attention)
        return
    for t, parent, other in ((0.0, a, b), (1.0, b, a)):
        end = sm.average(found.reference, found.aligned, t, attention=attention)
        assert difference(parent, end) <= 1e-10
        assert difference(other, end) > 1e-2  # the control


def test_circuits_need_no_common_basis(aligned):
    """Turning bases inside B's heads changes the mean of factors, not that of circuits."""
    a, _, found = aligned
    if a.spec.family in ("llama", "neox"):
        pytest.skip("rotary: only values have a free basis")
    alignment = sm.Alignment.random(found.aligned.spec, torch.Generator().manual_seed(0))
    still = sm.Alignment.identity(found.aligned.spec)
    inside = {
        name: element if name.startswith(("qk", "vo")) else still[name]
        for name, element in alignment.elements.items()
    }
    turned = sm.apply(sm.Alignment(found.aligned.spec, inside), found.aligned)
    middle = {
        kind: [
            sm.average(found.reference, other, attention=kind) for other in (found.aligned, turned)
        ]
        for kind in ("factors", "svd", "circuits")
    }
    assert difference(*middle["circuits"]) <= 1e-10
    assert difference(*middle["svd"]) <= 1e-8
    assert difference(*middle["factors"]) > 1e-3


def test_parts_at_their_own_t(aligned):
    a, _, found = aligned
    merged = sm.average(
        found.reference, found.aligned, 0.5, at={"ff": 0.0, "ff.1": 1.0, "layer.0": 0.25}
    )
    for name in merged.weights:
        spaces = {atom.space for piece in merged.spec.pieces[name] for atom in piece.atoms}
        t = 0.0 if "ff.0" in spaces else 1.0 if "ff.1" in spaces else None
        t = 0.25 if t == 0.0 else t  # the layer is narrower than the kind
        if t is not None:
            expected = torch.lerp(found.reference.weights[name], found.aligned.weights[name], t)
            assert torch.equal(merged.weights[name], expected), name
    with pytest.raises(MismatchError, match=r"no part called mlp"):
        piece_time(a.spec, 0.5, {"mlp": 0.1})


def test_an_inflated_merge_is_marked_and_only_symmerge_loads_it(tmp_path):
    import transformers

    a, b = (sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1))
    found = sm.align(a, b, sm.WeightMatching(generate_text=False))
    merged = sm.average(
        found.reference, found.aligned, attention="circuits", evidence=found.evidence()
    )
    sm.save(merged, tmp_path / "m")
    assert "not a stock checkpoint" in (tmp_path / "m" / "README.md").read_text()
    assert not json.loads((tmp_path / "m" / "symmerge.json").read_text())["stock"]
    assert sm.verify(sm.load(tmp_path / "m"), merged).same
    with pytest.raises(RuntimeError, match=r"size|shape"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_the_card_says_what_was_merged_and_why(tmp_path):
    a, b = (sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1))
    found = sm.align(a, b, sm.WeightMatching(tries=2))
    sm.save(
        sm.average(found.reference, found.aligned, 0.25, evidence=found.evidence()), tmp_path / "m"
    )
    card = (tmp_path / "m" / "README.md").read_text()
    assert (
        "## Parents" in card
        and "| 0.75 |" in card
        and a.digest()[:16] in card
        and b.digest()[:16] in card
    )
    assert f"distance after: {found.after:.3f}" in card and "of 2 tries" in card
    sm.save(sm.average(a, b), tmp_path / "plain")
    assert "averaged as they are" in (tmp_path / "plain" / "README.md").read_text()
