"""A symmetry changes every weight and no logit, in float64 and in stock float32 transformers."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError, SymmetryError
from symmerge.lab.small_models import EVERY, SMALL, small_model
from symmerge.models.alignment import Alignment, made_for
from symmerge.models.orbit import follow, keep, random_member
from symmerge.symmetry.notation import atoms
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of
from symmerge.verification.transport import check_transport

EXACT, STOCK = 1e-10, 1e-4
# Every table is run in float64 and, written, in stock float32; what groups and steps do in general
# is tested on one model of each kind (`SMALL`).
# visible coordinates of the pooled output of a class without a head; all, if no classifier
SHOWN = {"single_label_classification": 5}
# Four key-value heads with three queries each: enough places for a head to go to a wrong one.
GROUPED = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4}


@cache
def loaded(name, **changes):
    return sm.load(small_model(name, dtype=torch.float64, **changes))


@cache
def folded(name, **changes):
    return sm.canonicalize(loaded(name, **changes), ("fold",))


def element(model, seed):
    return Alignment.random(model.spec, torch.Generator().manual_seed(seed))


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def change(a, b):
    """The largest relative difference between two models' tensors."""
    return max(relative(a.weights[name], b.weights[name]) for name in a.spec.tensors)


# float64: exact up to rounding


@pytest.mark.parametrize(("seed", "name"), enumerate(EVERY))
def test_a_random_element_of_the_full_group_changes_no_logit(seed, name):
    _, member = random_member(loaded(name), seed)
    assert difference(loaded(name), member) <= EXACT


@pytest.mark.parametrize("name", SMALL)
def test_a_random_element_changes_every_matrix(name):
    # Else the test above would pass for an element that does nothing.
    _, member = random_member(loaded(name))
    matrices = [
        tensor
        for tensor, axes in member.spec.tensors.items()
        if len(axes) > 1 and {atom.space for atom in atoms(axes)} & member.spec.hidden.keys()
        if tensor not in {constant.parameter for constant in member.spec.constants}  # zero by now
    ]
    base = folded(name).weights
    assert min(relative(member.weights[tensor], base[tensor]) for tensor in matrices) > 0.1


@pytest.mark.parametrize("name", SMALL)
def test_the_canonical_form_and_its_orbit_compute_the_same(name):
    canonical = sm.canonicalize(loaded(name))
    assert difference(loaded(name), canonical) <= EXACT
    assert difference(loaded(name), sm.apply(element(canonical, 5), canonical)) <= EXACT


# float32: what users run, stock transformers alone


@torch.no_grad()
def stock_logits(module, inputs):
    output = module(**inputs)
    scores = [value for key, value in output.items() if "logits" in key]
    if shown := SHOWN.get(module.config.problem_type):
        return [output.pooler_output[:, :shown]]
    embeds = [key for key in ("text_embeds", "image_embeds") if key in output]
    features = (output.get(key) for key in embeds or ("last_hidden_state", "pooler_output"))
    return scores or [value for value in features if value is not None]


# A tie, names that differ from those in the file, and a plain one also in shards.
@pytest.mark.parametrize(
    ("name", "shard"),
    [*((name, 10**9) for name in EVERY), ("gpt2", 40_000), ("vit", 40_000), ("llama", 40_000)],
)
def test_stock_transformers_loads_the_member_and_gives_the_same_logits(name, shard, tmp_path):
    module = small_model(name)
    module.save_pretrained(tmp_path / "stock")  # its names in files are others than in memory
    model = sm.load(tmp_path / "stock")
    inputs = samples(model, 1)[0].inputs
    moved = random_member(model, 1)[1]
    folder = sm.save(moved, tmp_path / "member", max_shard_bytes=shard)
    assert check_transport(sm.load(folder), moved) == len(moved.weights.names())
    assert (folder / "model.safetensors.index.json").exists() == (shard < 10**9)
    member, info = type(module).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    pairs = zip(stock_logits(module, inputs), stock_logits(member.eval(), inputs), strict=True)
    assert all(relative(after, before) <= STOCK for before, after in pairs)


# the float64 path itself, against a Llama written from the paper


def llama(weights, tokens, *, layers, heads, kv, size, theta, eps):
    """Logits in plain torch; angles in float32, as transformers computes them."""
    rows, length = tokens.shape
    frequency = 1 / theta ** (torch.arange(0, size, 2).float() / size)
    angle = torch.outer(torch.arange(length).float(), frequency)
    turn = torch.complex(angle.cos().double(), angle.sin().double())
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x):
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def split(x, name, count):
        return (x @ weights[f"{name}.weight"].T).view(rows, length, count, size).transpose(1, 2)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm")
        q = rotate(split(h, f"{at}.self_attn.q_proj", heads))
        k = rotate(split(h, f"{at}.self_attn.k_proj", kv))
        v = split(h, f"{at}.self_attn.v_proj", kv)
        k, v = (side.repeat_interleave(heads // kv, 1) for side in (k, v))
        scores = (q @ k.mT / size**0.5).masked_fill(~causal, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, heads * size)
        x = x + mixed @ weights[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (h @ weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("changes", [{}, GROUPED], ids=["two groups", "four groups"])
def test_float64_logits_agree_with_an_independent_reference(changes):
    model = loaded("llama", **changes)
    heads, kv = (model.config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    sample = samples(model, 2)[0]
    sizes = {"layers": 2, "heads": heads, "kv": kv, "size": 48 // heads}
    eps = model.config["rms_norm_eps"]
    tokens = sample.inputs["input_ids"]
    expected = llama(model.weights, tokens, **sizes, theta=10000.0, eps=eps).flatten(0, 1)
    assert relative(logits_of(model, sample, dtype=torch.float64)["logits"], expected) <= 1e-12
    # Control: float32 anywhere would show.
    assert relative(logits_of(model, sample, dtype=torch.float32)["logits"], expected) > 1e-9


# the group laws, on whole models


@pytest.mark.parametrize("name", SMALL)
def test_an_element_is_undone_by_its_inverse(name):
    model, g = folded(name), element(folded(name), 3)
    assert change(sm.apply(g.inverse(), sm.apply(g, model)), model) <= 1e-12
    assert change(sm.apply(g.compose(g.inverse()), model), model) <= 1e-12


@pytest.mark.parametrize("name", SMALL)
def test_composition_is_one_after_the_other(name):
    model, g, h = folded(name), element(folded(name), 3), element(folded(name), 4)
    assert change(sm.apply(g.compose(h), model), sm.apply(g, sm.apply(h, model))) <= 1e-12


def test_elements_inside_a_head_follow_the_head():
    model = folded("llama", **GROUPED)
    g, h = element(model, 3), element(model, 4)
    indices = [alignment[f"head.{i}"]["index"] for alignment in (g, h) for i in range(2)]
    assert not any(torch.equal(index, torch.arange(4)) for index in indices)
    twice = sm.apply(g, sm.apply(h, model))
    assert difference(model, twice) <= EXACT
    assert change(sm.apply(g.compose(h), model), twice) <= 1e-12
    assert change(sm.apply(g.inverse(), sm.apply(g, model)), model) <= 1e-12
    # Control: composing each space by itself, without reindexing, gives another model.
    spaces = model.spec.hidden
    naive = {name: space.group.compose(g[name], h[name]) for name, space in spaces.items()}
    assert change(sm.apply(Alignment(model.spec, naive), model), twice) > 1e-2


# saving an alignment, and refusing a wrong one


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_alignment_comes_back(name, tmp_path):
    model, g = folded(name), element(folded(name), 6)
    g.save(tmp_path / "g.safetensors")
    back = Alignment.load(tmp_path / "g.safetensors", model.spec)
    assert back.elements.keys() == g.elements.keys()
    assert all(
        torch.equal(back[space][component], value)
        for space, element in g.elements.items()
        for component, value in element.items()
    )
    assert change(sm.apply(back, model), sm.apply(g, model)) <= 1e-15


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {}), ("gpt2-untied", {"n_embd": 24}), ("gpt2-untied", {"vocab_size": 100})],
)
def test_another_architecture_or_size_is_refused(name, changes, tmp_path):
    g, other = element(folded("gpt2"), 0), folded(name, **changes)
    with pytest.raises(MismatchError, match="another architecture"):
        sm.apply(g, other)
    with pytest.raises(MismatchError):
        g.compose(element(other, 0))
    g.save(tmp_path / "g.safetensors")
    with pytest.raises(MismatchError, match="another gpt2 table"):
        Alignment.load(tmp_path / "g.safetensors", other.spec)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_another_checkpoint_is_refused(name, tmp_path):
    model, other = loaded(name), loaded(name, seed=1)
    g, member = random_member(model, 2)
    keep(g, model, tmp_path / "g.safetensors")
    assert change(follow(tmp_path / "g.safetensors", model), member) <= 1e-15
    with pytest.raises(MismatchError, match="was made for"):
        follow(tmp_path / "g.safetensors", other)


def test_one_changed_tensor_is_another_checkpoint():
    model = loaded("gpt2-untied")
    tensors = {name: model.weights[name] for name in model.weights}
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"] + 1e-3
    base = replace(model.source, base=MemoryWeights(tensors), digests={})
    other = sm.canonicalize(replace(model, weights=base, source=base), ("fold",))
    g = replace(element(other, 0), header=made_for(model))
    sm.apply(g, folded("gpt2-untied")).weights["transformer.wte.weight"]
    with pytest.raises(MismatchError, match=r"wte\.weight has other values"):
        sm.apply(g, other).weights["transformer.wte.weight"]


def spoil(value, how):
    value = value.clone()
    how(value)
    return value


# model, space, component, what is done to it, what the refusal says
CORRUPTED = {
    "not orthogonal": ("llama", "residual", "matrix", lambda m: m.mul_(1.01), "not orthogonal"),
    "not fixing ones": ("gpt2", "residual", "matrix", lambda m: m.neg_(), "ones vector"),
    "not finite": ("vit", "residual", "matrix", lambda m: m[0].fill_(torch.nan), "not finite"),
    "singular": ("gpt2", "qk.0", "matrix", lambda m: m[2, 0].zero_(), "singular"),
    "an index twice": ("bert", "residual", "index", lambda i: i[0].copy_(i[1]), "permutation"),
    "an index too large": ("bert", "ff.1", "index", lambda i: i[0].fill_(len(i)), "permutation"),
    "a zero pair": ("neox", "qk.1", "pair", lambda p: p[1, 0].zero_(), "zero"),
    "a negative scale": ("gpt2-untied", "ff.0", "scale", lambda s: s[3].neg_(), "negative"),
    "a zero scale": ("llama", "ff.0", "scale", lambda s: s[3].zero_(), "zero"),
    "half a sign": ("vit-tanh", "ff.0", "sign", lambda s: s[0].mul_(0.5), "sign"),
}


@pytest.mark.parametrize("case", CORRUPTED)
def test_a_corrupted_element_is_refused(case, tmp_path):
    name, space, component, how, reason = CORRUPTED[case]
    g = element(folded(name), 0)
    g.check()
    spoiled = {**g[space], component: spoil(g[space][component], how)}
    bad = replace(g, elements={**g.elements, space: spoiled})
    bad.save(tmp_path / "bad.safetensors")
    for attempt in (bad.check, lambda: Alignment.load(tmp_path / "bad.safetensors", g.spec)):
        with pytest.raises(SymmetryError, match=f"'{space}'.*{reason}"):
            attempt()


def test_missing_and_misshapen_elements_are_refused():
    g = element(folded("gpt2"), 0)
    others = {name: one for name, one in g.elements.items() if name != "ff.0"}
    with pytest.raises(MismatchError, match=r"different spaces: ff\.0"):
        replace(g, elements=others).check()
    index = g["ff.0"]["index"]
    for wrong in ({}, {"index": index[:-1]}, {"index": index, "sign": torch.ones(96)}):
        with pytest.raises(SymmetryError, match="expects"):
            replace(g, elements={**others, "ff.0": wrong}).check()
