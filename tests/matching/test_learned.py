"""Learned matching: elements move along their groups, ends stay, the midpoint gets better."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from differences import difference
from fixtures import checkpoint
from processes import run_script_in_two
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import symmerge as sm
from symmerge.checkpoints.weights import CachedWeights, MemoryWeights
from symmerge.errors import DataError, MismatchError
from symmerge.lab.small_models import small_model
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning import mean_module
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.distillation import DistillationBatch, distillation_loss
from symmerge.matching.learning.gradients import over_roles, space_gradients
from symmerge.matching.learning.learner import pair_learner
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel
from symmerge.matching.learning.pair import PairObjective
from symmerge.matching.learning.permutations import NEAR_A, reassign
from symmerge.matching.optimization.precision import tf32_matmuls
from symmerge.matching.resume import ResumeFile
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment, apply
from symmerge.verification.modules import full_module

START = WeightMatching(generate_text=False, max_sweeps=2)
OWN = {
    "gpt2": "clm",
    "llama": "clm",
    "llama-mqa": "clm",
    "neox": "clm",
    "bert": "mlm",
}  # write their own text


@cache
def ready(name, seed=0):
    return kept(sm.load(small_model(name, seed=seed, dtype=torch.float64, **one_layer(name))))


def one_layer(name):
    """What is tested here does not depend on how many there are."""
    return {"n_layer" if name.startswith("gpt2") else "num_hidden_layers": 1}


def kept(model):
    """In canonical form, computed once: as `align` does it."""
    model = sm.canonicalize(model)
    return replace(model, weights=CachedWeights(model.weights))


def pair(name="gpt2"):
    return ready(name), ready(name, 1)


@cache
def own(name="gpt2", samples=24):
    return sm.make_task(OWN[name], "self", pair(name), samples=samples)


@cache
def anywhere(name="gpt2", seed=5):
    return Alignment.random(ready(name).spec, torch.Generator().manual_seed(seed))


def options(name="gpt2", **changes):
    return LearnedMatching(
        **{
            "data": own(name),
            "start": anywhere(name),
            "steps": 6,
            "batch_size": 6,
            "lr": 1e-2,
            **changes,
        }
    )


def learn(name="gpt2", progress=None, resume_file=None, **changes):
    return options(name, **changes).solve(*pair(name), progress=progress, resume_file=resume_file)


def begun(name="gpt2", models=None, **changes):
    """A learner that has not taken a step."""
    chosen, (a, b) = options(name, **changes), models or pair(name)
    return pair_learner(chosen, a, b, chosen.start, load_data(chosen, [a, b], lambda line: None))


def apart(first, second):
    """The spaces, without their layer, in which two alignments differ."""
    parts = [(space, part) for space in first.elements for part in first[space]]
    return {
        space.partition(".")[0]
        for space, part in parts
        if not torch.equal(first[space][part], second[space][part])
    }


# learning


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Texts, and sentences with a label."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.\n" * 30
    )
    (folder / "rows.tsv").write_text(
        "label\ttext\n"
        + "".join(f"{n % 3}\tthe cat number {n} sat on the {'mat ' * (n % 5)}\n" for n in range(24))
    )
    return folder


CASES = {
    "gpt2": ("clm", "self", {}),
    "llama": ("clm", "self", {}),
    "llama-mqa": ("clm", "text.txt", {}),
    "neox": ("clm", "self", {}),
    "bert": ("mlm", "self", {}),
    "roberta": ("mlm", "text.txt", {}),
    "bert-classifier": ("text", "rows.tsv", {}),
    "vit": ("image", "digits", {"num_labels": 10}),
}


@pytest.mark.parametrize("name", CASES)
def test_learning_helps_and_the_ends_stay_exact(name, place, tmp_path):
    task, data, changes = CASES[name]
    if data == "self":
        a, b = pair(name)
    else:
        folders = [
            checkpoint(
                tmp_path / str(seed),
                name,
                seed=seed,
                dtype=torch.float64,
                **one_layer(name),
                **changes,
            )
            for seed in (0, 1)
        ]
        a, b = (kept(sm.load(folder)) for folder in folders)
    given = (
        own(name)
        if data == "self"
        else sm.make_task(task, str(place / data) if "." in data else data, [a, b], samples=24)
    )
    start = Alignment.random(a.spec, torch.Generator().manual_seed(5))
    matching = LearnedMatching(
        data=given, start=start, steps=6, batch_size=6, lr=1e-2, held_out=0.25
    )
    solution = matching.solve(a, b)
    before, after = solution.objective[0], min(solution.objective)
    assert (
        len(solution.objective) == 7 and after < before - 1e-3
    )  # on held-out inputs; the first is before any step
    assert difference(b, apply(solution.alignment, b)) <= 1e-10
    assert apart(solution.alignment, start) >= {"qk", "vo"}  # the control: something was learned
    assert difference(a, apply(solution.alignment, b)) > 1e-2  # the other: they are two functions
    again = replace(matching, start=solution.alignment, steps=1).solve(a, b)
    assert again.objective[0] == pytest.approx(
        after, rel=1e-5
    )  # what is given back is what was judged best


def test_learning_starts_where_another_method_ends():
    solution = learn(start=START)
    start = START.solve(*pair()).alignment
    assert solution.objective[0] == pytest.approx(
        learn(start=start, steps=1).objective[0], rel=1e-6
    )
    assert min(solution.objective) < solution.objective[0] and apart(solution.alignment, start)
    record = json.loads(json.dumps(solution.settings, default=str))
    assert (
        record["learned"]["steps"] == 6
        and record["start"]["max_sweeps"] == 2
        and record["data"]["data"] == "self"
    )


def test_an_alignment_that_leaves_its_group_would_be_noticed():
    """The control of exactness: the same change without the exponential is no symmetry."""
    start = anywhere()
    turned = start["residual"]["matrix"] + 0.01 * torch.randn(
        start["residual"]["matrix"].shape, generator=torch.Generator().manual_seed(0)
    )
    with pytest.raises(sm.SymmergeError):
        apply(Alignment(start.spec, {**start.elements, "residual": {"matrix": turned}}), pair()[1])


# the gradient


class Placed(nn.Module):
    """A model with other tensors than its own, through which gradients flow."""

    def __init__(self, model, tensors):
        super().__init__()
        self.inner, self.ties, self.tensors = (
            full_module(model, torch.float64),
            model.spec.ties,
            tensors,
        )

    def forward(self, **inputs):
        names = [
            (name, self.ties.get(name, name))
            for name, _ in self.inner.named_parameters(remove_duplicate=False)
        ]
        inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        return torch.func.functional_call(
            self.inner,
            {name: self.tensors[tensor] for name, tensor in names if tensor in self.tensors},
            (),
            inputs,
        )


def truth(models, start, spaces, share, lessons):
    """Autograd in float64 through everything: gradients by each tangent and moved tensor."""
    a, b = models
    table, there = a.spec, apply(start, b)
    groups = {space: table.spaces[space].group for space in spaces}
    along = {
        (space, part): torch.zeros(
            *table.batch(space), *shape, dtype=torch.float64, requires_grad=True
        )
        for space, group in groups.items()
        for part, shape in group.tangent().items()
    }
    elements = {
        space: group.retract(
            group.identity(table.batch(space)),
            {part: along[space, part] for part in group.tangent()},
        )
        for space, group in groups.items()
    }
    moved = {
        tensor: Alignment(table, elements).transport(tensor, there.weights[tensor]).requires_grad_()
        for tensor in table.tensors
    }
    mean = {tensor: torch.lerp(a.weights[tensor], value, share) for tensor, value in moved.items()}
    loss = sum(distillation_loss(Placed(a, mean), lesson) for lesson in lessons) / len(lessons)
    found = torch.autograd.grad(loss, [*along.values(), *moved.values()], materialize_grads=True)
    return dict(zip([*along, *moved], found, strict=True)), {
        tensor: value.detach() for tensor, value in moved.items()
    }


def uphill(learner):
    """The gradients that a step found, by space and part."""
    parts = [
        (bundle, part, value.grad)
        for bundle, parts in learner.objective.members[0].tangents.items()
        for part, value in parts.items()
    ]
    return {
        (space, part): gradient
        for bundle, part, gradients in parts
        for space, gradient in zip(bundle.names, gradients, strict=True)
    }


def moved_table(learner):
    return learner.objective.members[0].layout.table


@pytest.mark.parametrize("target", ["parents", "labels"])
@pytest.mark.parametrize("name", OWN)
def test_a_step_follows_the_gradient_of_the_loss(name, target, monkeypatch):
    """Also where a tensor is used twice: BERT's embedding is tied."""
    monkeypatch.setattr(MovingModel, "_step", lambda self, optimizer: None)
    learner = begun(name, target=target)
    lessons = (learner.data.train[0], learner.data.train[1])
    learner.objective.segment.t.fill_(0.35)
    learner.descend(lessons)
    found = uphill(learner)
    spaces = {space for space, _ in found}
    assert {space.partition(".")[0] for space in spaces} >= {"qk", "vo"}
    expected, _ = truth(pair(name), anywhere(name), spaces, 0.35, lessons)
    for (space, part), value in found.items():
        gradient = expected[space, part]
        assert (value - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, (space, part)
    near, moved = truth(pair(name), anywhere(name), spaces, NEAR_A, lessons)
    objective = learner.objective
    for space, roles in objective.flips[0].gradients(objective.segment, lessons).items():
        total = over_roles(roles)
        gradient = over_roles(
            space_gradients(
                moved_table(learner),
                [space],
                {tensor: near[tensor] for tensor in moved_table(learner).tensors},
                moved,
            )[space]
        )
        assert (total - gradient).norm() <= 1e-4 * gradient.norm(), space
        assert gradient.norm() > 1e-4
    other = truth(pair(name), anywhere(name), ["vo.0"], 0.65, lessons)[0]["vo.0", "change"]
    assert (
        found["vo.0", "change"] - other
    ).norm() > 0.1 * other.norm()  # the control: elsewhere on the line


def test_two_batches_accumulated_are_one_of_twice_the_size(monkeypatch):
    monkeypatch.setattr(MovingModel, "_step", lambda self, optimizer: None)
    learner = begun()
    learner.objective.segment.t.fill_(0.4)
    first, second = learner.data.train[0], learner.data.train[1]
    both = DistillationBatch(
        {name: torch.cat([first.inputs[name], second.inputs[name]]) for name in first.inputs},
        None,
        None,
        torch.cat([first.targets, second.targets]),
    )
    found = []
    for lessons in ((first, second), (both,), (first,)):
        learner.descend(lessons)
        found.append(
            torch.cat([value.grad.flatten() for value in learner.objective.members[0].parameters])
        )
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()
    assert (found[2] - found[1]).norm() > 0.05 * found[1].norm()  # the control
    assert learner.losses.values[0].item() == pytest.approx(
        learner.losses.values[1].item(), rel=1e-6
    )


class Counting(TorchDispatchMode):
    """Products, wherever they come from."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket.__name__ in ("mm", "bmm", "baddbmm", "baddbmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_has_as_many_products_however_many_layers_there_are(name, monkeypatch):
    """Beside the model's own: on a GPU starting them is what costs."""
    monkeypatch.setattr(MeanModule, "_accumulate", lambda self, batches, scale: scale.clone())
    found = []
    for layers in (2, 5):
        changes = dict.fromkeys(one_layer(name), layers)
        models = [
            kept(sm.load(small_model(name, seed=seed, dtype=torch.float64, **changes)))
            for seed in (0, 1)
        ]
        learner = begun(name, models, start=Alignment.identity(models[0].spec), data=own(name))
        for holder in learner.objective.mean.module.parameters():
            holder.grad = torch.ones_like(holder)
        with Counting() as counting:
            learner.descend(())
        found.append(counting.products)
    assert found[0] == found[1] < 100


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tf32_is_used_inside_only(device):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with tf32_matmuls(torch.device(device)):
        assert matmul.allow_tf32 is (device == "cuda" or before)
    assert matmul.allow_tf32 is before
    with pytest.raises(KeyError), tf32_matmuls(torch.device(device)):
        raise KeyError
    assert matmul.allow_tf32 is before


def test_accumulating_sees_more_of_the_data(monkeypatch):
    seen = []
    monkeypatch.setattr(
        PairObjective, "descend", lambda self, batches: seen.append(len(batches)) or torch.zeros(())
    )
    learn(accumulate=3, steps=2)
    learn(steps=2)
    assert seen == [3, 3, 1, 1]


# permutations


def noisy(model, size):
    """The model and some noise in its matrices, in proportion to them."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: model.weights[name] for name in model.spec.tensors}
    noise = {
        name: size * value.std() * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in tensors.items()
        if value.ndim > 1
    }
    return replace(
        model,
        weights=MemoryWeights(
            {name: value + noise.get(name, 0) for name, value in tensors.items()}
        ),
    )


def swapped(model, space, *places):
    """The identity, but for a few places that have changed with each other."""
    still = Alignment.identity(model.spec)
    index = still[space]["index"].clone()
    for i, j in places:
        index[..., [i, j]] = index[..., [j, i]]
    return Alignment(model.spec, {**still.elements, space: {**still[space], "index": index}})


def wrong_places(alignment):
    still = Alignment.identity(alignment.spec)
    return sum(
        int((alignment[space]["index"] != still[space]["index"]).sum())
        for space in still.elements
        if "index" in still[space]
    )


PLANTED = [
    ("gpt2", "ff.0", ((0, 1), (10, 40), (7, 90))),
    ("gpt2", "head.0", ((0, 3),)),
    ("llama", "ff.0", ((0, 1), (7, 90))),
    ("bert", "residual", ((3, 30),)),
]


@pytest.mark.parametrize(("name", "space", "places"), PLANTED)
def test_planted_swaps_flip_back(name, space, places):
    a = ready(name)
    b, start = noisy(a, 0.05), swapped(a, space, *places)
    matching = options(name, start=start, spaces=(space,), steps=21, patience=100, batch_size=12)
    solution = matching.solve(a, b)
    learned = solution.settings["learned"]
    assert wrong_places(start) == 2 * len(places) and wrong_places(solution.alignment) == 0
    assert (
        learned["flips_tried"] >= learned["flips_kept"] >= 2 * len(places)
        and learned["stopped"] == "all steps done"
    )
    assert solution.objective[-1] < solution.objective[0]
    assert difference(b, apply(solution.alignment, b)) <= 1e-10


def test_without_permutations_nothing_flips():
    a = ready("llama")
    start = swapped(a, "ff.0", (0, 1), (7, 90))
    solution = options(
        "llama", start=start, spaces=("ff",), permutations=False, steps=12, patience=100
    ).solve(a, noisy(a, 0.05))
    assert (
        wrong_places(solution.alignment) == 4 and solution.settings["learned"]["flips_tried"] == 0
    )
    assert not torch.equal(
        solution.alignment["ff.0"]["scale"], start["ff.0"]["scale"]
    )  # the control: scales were learned


def test_flips_that_do_not_help_are_undone():
    """Where nothing is out of place: proposals are tried, and all of them taken back."""
    a = ready("llama")
    solution = options(
        "llama", start=Alignment.identity(a.spec), spaces=("ff",), steps=12, patience=100
    ).solve(a, noisy(a, 0.05))
    assert (
        solution.settings["learned"]["flips_tried"]
        > solution.settings["learned"]["flips_kept"]
        == 0
    )
    assert wrong_places(solution.alignment) == 0


def pull(share, i, j, monkeypatch):
    """What a swap of units would gain at a share of B: of two swapped units, and at most."""
    a = ready("llama")
    learner = begun(
        "llama",
        models=(a, noisy(a, 0.05)),
        start=swapped(a, "ff.0", (i, j)),
        spaces=("ff.0",),
        batch_size=22,
    )
    monkeypatch.setattr("symmerge.matching.learning.permutations.NEAR_A", share)
    flips, segment = learner.objective.flips[0], learner.objective.segment
    slope = over_roles(flips.gradients(segment, [learner.data.train[0]])["ff.0"])
    own = slope.diagonal()
    gained = own[:, None] + own[None] - slope - slope.mT
    return gained[i, j].item(), gained.max().item()


@pytest.mark.parametrize(("i", "j"), [(0, 1), (10, 40), (7, 90)])
def test_near_a_the_slope_sees_two_units_that_are_swapped(i, j, monkeypatch):
    """It is blind at the midpoint, where both units have one mean: flips are sought near A."""
    near, middle, beyond = (pull(share, i, j, monkeypatch) for share in (NEAR_A, 0.5, 0.7))
    assert near[0] == near[1] > 0
    assert abs(middle[0]) < 0.3 * near[0] and beyond[0] < 0


def test_reassigning_takes_a_step_down_the_slope():
    n = 12
    gram, slope = torch.eye(n), torch.zeros(n, n)
    assert torch.equal(reassign(gram, slope, 0.1), torch.arange(n))  # nothing pulls
    slope[2, 2] = slope[5, 5] = 1.0  # it would help to have another unit in these places
    slope[2, 5] = slope[5, 2] = -1.0  # namely each other
    swap = torch.arange(n)
    swap[[2, 5]] = swap[[5, 2]]
    assert torch.equal(reassign(gram, slope, 0.1), swap)
    assert torch.equal(reassign(gram, -slope, 0.1), torch.arange(n))  # the control: uphill
    heads = torch.stack([slope, torch.zeros(n, n)])
    assert torch.equal(
        reassign(gram.expand(2, n, n), heads, 0.05), torch.stack([swap, torch.arange(n)])
    )


# planted symmetries


def nearby(spec, size):
    """A symmetry a little away from the identity, in every continuous direction."""
    generator = torch.Generator().manual_seed(3)

    def element(name, group):
        along = {
            part: size
            * torch.randn(*spec.batch(name), *shape, generator=generator, dtype=torch.float64)
            for part, shape in group.tangent().items()
        }
        return group.retract(group.identity(spec.batch(name)), along)

    return Alignment(
        spec, {name: element(name, space.group) for name, space in spec.hidden.items()}
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_planted_symmetry_is_learned_from_the_identity(name):
    """Directions of 0.1 each and 5% noise: nine tenths of the excess loss go in 40 steps."""
    a = ready(name)
    planted = nearby(a.spec, 0.1)
    b = noisy(apply(planted, a), 0.05)
    matching = options(name, start=Alignment.identity(a.spec), steps=40, batch_size=8)
    solution = matching.solve(a, b)
    floor = replace(matching, start=planted.inverse(), steps=1).solve(a, b).objective[0]
    before, after = (loss - floor for loss in (solution.objective[0], min(solution.objective)))
    assert before > 0.02 and after < 0.1 * before
    stream = [
        (element["matrix"] - torch.eye(48)).norm()
        for element in (planted["residual"], solution.alignment.compose(planted)["residual"])
    ]
    assert stream[1] < 0.9 * stream[0]  # the rotation itself is nearer, as far as the loss sees it


# what moves


def test_only_the_spaces_chosen_move():
    chosen = (("vo",), ("residual", "qk"), ("heads",), ("qk.0",), None)
    moved = [apart(learn(spaces=spaces, steps=1).alignment, anywhere()) for spaces in chosen]
    assert moved == [{"vo"}, {"residual", "qk"}, {"qk", "vo"}, {"qk"}, {"residual", "qk", "vo"}]


def test_parts_have_the_spaces_of_their_kind():
    table = sm.load(small_model("llama")).spec
    kinds = {
        part: {
            space.partition(".")[0]
            for space in LearnedMatching(spaces=(part,)).chosen_spaces(table)
        }
        for part in ("residual", "heads", "ff")
    }
    assert kinds == {"residual": {"residual"}, "heads": {"head", "query", "qk", "vo"}, "ff": {"ff"}}
    assert LearnedMatching().chosen_spaces(table) == list(table.hidden)
    assert set(LearnedMatching(spaces=("ff.1", "vo")).chosen_spaces(table)) == {
        "vo.0",
        "vo.1",
        "ff.1",
    }


@pytest.mark.parametrize("name", ["attention", "classifier", "qk.7", "query"])
def test_an_unknown_space_is_refused_with_the_list(name):
    with pytest.raises(
        MismatchError,
        match=f"this model has no part called '{name}': choose one of ff, heads, residual, or",
    ) as refused:
        learn(spaces=("vo", name))
    assert "spaces ff.0, head.0, qk.0, residual and 1 more" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_to_learn_is_said():
    with pytest.raises(MismatchError, match="nothing can be learned"):
        learn(spaces=("ff",), permutations=False)


def test_models_of_different_tables_are_refused():
    with pytest.raises(MismatchError, match="cannot be aligned"):
        options().solve(ready("gpt2"), ready("llama"))
    with pytest.raises(MismatchError):
        options(start=anywhere("llama")).solve(*pair())


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="1 samples of self are too few"):
        learn(data=own(samples=1))


def test_models_that_nobody_writes_for_need_data():
    with pytest.raises(
        MismatchError, match=r"has no inputs without data .*: give data to learn from"
    ):
        LearnedMatching(start=Alignment.identity(ready("bert-classifier").spec)).solve(
            *pair("bert-classifier")
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"batch_size": 0},
        {"accumulate": 0},
        {"held_out": 1.0},
        {"patience": 0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(MismatchError, match=f"^{name} .*: give a number above 0"):
        options(**wrong)


# the run


def test_the_same_seed_learns_the_same():
    first, again, other = (learn(seed=seed, steps=2) for seed in (0, 0, 1))
    assert first.objective == again.objective != other.objective
    assert not apart(first.alignment, again.alignment) and apart(first.alignment, other.alignment)


def test_parents_write_where_there_is_no_data(monkeypatch):
    monkeypatch.setattr("symmerge.matching.learning.data.SELF_SAMPLES", {"clm": 24})
    said = []
    solution = learn(data=None, steps=3, progress=said.append)
    assert (
        "generating inputs to learn from: the models sample text" in said
        and solution.settings["data"] == "self"
    )
    assert solution.objective == learn(steps=3).objective  # the same text as from the task


def test_labels_as_target():
    solution, other = learn(target="labels", steps=4), learn(steps=4)
    assert min(solution.objective) < solution.objective[0] - 1e-3
    assert abs(solution.objective[0] - other.objective[0]) > 1e-3 and apart(
        solution.alignment, other.alignment
    )
    assert difference(pair()[1], apply(solution.alignment, pair()[1])) <= 1e-10


SHARES = {
    "fixed:0.3": (0.3, 0.3),
    "narrow": (0.4, 0.6),
    "wide": (0.0, 1.0),
    "normal:0.5,0.05": (0.0, 1.0),
    "beta:2,2": (0.0, 1.0),
}


@pytest.mark.parametrize("sampler", SHARES)
def test_steps_are_taken_where_the_sampler_says(sampler, monkeypatch):
    seen = []
    monkeypatch.setattr(
        PairObjective,
        "descend",
        lambda self, batches: seen.append(self.segment.t.item()) or torch.zeros(()),
    )
    learn(sampler=sampler, steps=12, patience=100)
    low, high = SHARES[sampler]
    assert low - 1e-6 <= min(seen) and max(seen) <= high + 1e-6 and len(seen) == 12
    assert len(set(seen)) == (1 if low == high else 12)


def test_an_unknown_sampler_is_refused_at_once():
    with pytest.raises(
        MismatchError,
        match="no sampler called 'triangle': choose one of narrow, fixed, wide, normal",
    ):
        options(sampler="triangle")


def test_epochs_count_all_that_is_learned_from():
    """Of 24 samples 2 are held out: three batches of 6 that are whole."""
    assert learn(epochs=2.0).settings["learned"]["steps"] == 6
    assert learn(epochs=2.0, accumulate=2).settings["learned"]["steps"] == 3


def test_a_run_that_gets_no_better_stops():
    said = []
    solution = learn(lr=1e-12, steps=10, patience=3, permutations=False, progress=said.append)
    learned = solution.settings["learned"]
    assert (
        learned["steps"] < 10
        and learned["stopped"] == "no better for 3 evaluations"
        and not solution.interrupted
    )
    assert (
        said[-1] == f"stopped at step {learned['steps']}: no better for 3 evaluations"
        and len(solution.objective) == learned["steps"] + 1
    )
    longer = learn(steps=6, patience=3).settings["learned"]
    assert longer["steps"] == 6 and longer["stopped"] == "all steps done"  # the control


def test_every_look_is_reported():
    said = []
    solution = learn(steps=3, progress=said.append)
    looks = [line for line in said if line.startswith("step ")]
    assert [line.split(":")[0] for line in looks] == [f"step {step} of 3" for step in range(4)]
    assert all(
        f"held-out loss {loss:.4f} at the midpoint" in line
        for loss, line in zip(solution.objective, looks, strict=True)
    )
    assert [line.count("the best so far") for line in looks] == [
        int(loss <= min(solution.objective[: at + 1])) for at, loss in enumerate(solution.objective)
    ]


def broken_at(monkeypatch, step):
    """The loss of one step is not a number."""
    steps, real = [], mean_module.distillation_loss

    def loss(module, lesson):
        steps.append(torch.is_grad_enabled())
        return real(module, lesson) * (math.nan if sum(steps) == step and steps[-1] else 1.0)

    monkeypatch.setattr(mean_module, "distillation_loss", loss)


@pytest.mark.parametrize("step", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run_and_the_best_stays(step, monkeypatch):
    whole_run = learn()
    broken_at(monkeypatch, step)
    said = []
    solution = learn(progress=said.append)
    assert (
        solution.settings["learned"]["stopped"] == f"the loss was not finite at step {step}"
        and solution.settings["learned"]["steps"] == step
    )
    assert "the best state before it is kept; lower --lr" in said[-1]
    assert solution.objective == whole_run.objective[:step] and all(
        map(math.isfinite, solution.objective)
    )
    best = min(range(step), key=solution.objective.__getitem__)
    monkeypatch.undo()
    assert learn(start=solution.alignment, steps=1).objective[0] == pytest.approx(
        solution.objective[best], rel=1e-5
    )
    assert difference(pair()[1], apply(solution.alignment, pair()[1])) <= 1e-10


def test_a_held_out_loss_that_is_not_finite_ends_the_run_too(monkeypatch):
    real, evaluations = MeanModule.loss, []

    def loss(self, batches):
        evaluations.append(1)
        return math.inf if len(evaluations) == 4 else real(self, batches)

    monkeypatch.setattr(MeanModule, "loss", loss)
    solution = learn()
    assert (
        solution.settings["learned"]["stopped"] == "the held-out loss was not finite at step 3"
        and len(solution.objective) == 3
    )


# interrupts


def stop_at(step):
    """Ctrl-C while a look is reported."""

    def progress(line):
        if line.startswith(f"step {step} of"):
            raise KeyboardInterrupt

    return progress


def test_an_interrupt_keeps_the_best_so_far():
    straight, solution = learn(), learn(progress=stop_at(3))
    assert (
        solution.interrupted
        and not solution.converged
        and solution.settings["learned"]["stopped"] == "interrupted"
    )
    assert (
        solution.settings["learned"]["steps"] == 3 and solution.objective == straight.objective[:4]
    )
    assert learn(start=solution.alignment, steps=1).objective[0] == pytest.approx(
        min(solution.objective), rel=1e-5
    )
    assert difference(pair()[1], apply(solution.alignment, pair()[1])) <= 1e-10
    assert not straight.interrupted and straight.converged  # the control


def test_resuming_gives_what_one_run_gives(tmp_path):
    """Before and after permutations are solved anew, in the middle of Adam's memory."""
    name, settings = "llama", {"steps": 14, "patience": 100, "batch_size": 4}
    straight = learn(name, **settings)
    resume_file = ResumeFile(tmp_path / "x.partial.safetensors", {"task": 1})
    for step in (7, 12):
        assert learn(name, progress=stop_at(step), resume_file=resume_file, **settings).interrupted
    said = []
    resumed = learn(name, progress=said.append, resume_file=resume_file, **settings)
    assert not resumed.interrupted and said[0] == "learning the symmetry"
    assert said[1].startswith("step 12 of")  # from the last look that was written
    assert resumed.objective == pytest.approx(straight.objective, rel=1e-9)
    assert (
        resumed.settings["learned"] == straight.settings["learned"]
        and straight.settings["learned"]["flips_tried"] > 0
    )
    for space, element in straight.alignment.elements.items():
        for part, value in element.items():
            torch.testing.assert_close(resumed.alignment[space][part], value, rtol=1e-9, atol=1e-9)


def test_an_interrupt_before_learning_is_that_of_the_start(monkeypatch):
    start = WeightMatching(generate_text=False, max_sweeps=2)
    early = replace(start.solve(*pair()), interrupted=True)
    monkeypatch.setattr(WeightMatching, "solve", lambda *args, **kwargs: early)
    monkeypatch.setattr(PairObjective, "descend", lambda *args: pytest.fail("learned"))
    assert learn(start=start) is early


# bases that are nearly singular


def test_a_basis_that_is_nearly_singular_is_mended_and_counted():
    start = anywhere()
    u, values, vh = torch.linalg.svd(start["vo.0"]["matrix"])
    values[1, -1] = values[1, 0] / 1e6  # of one head
    bad = Alignment(
        start.spec, {**start.elements, "vo.0": {"matrix": (u * values[:, None, :]) @ vh}}
    )
    solution = learn(start=bad, steps=2)
    assert solution.settings["learned"]["projected"] >= 1
    assert (
        torch.linalg.cond(bad["vo.0"]["matrix"]).max() > 9e5
        and torch.linalg.cond(solution.alignment["vo.0"]["matrix"]).max() < 1.01e4
    )
    assert difference(pair()[1], apply(solution.alignment, pair()[1])) <= 1e-10
    assert learn(steps=2).settings["learned"]["projected"] == 0  # the control


# several processes

SCRIPT = """
import json, sys
import torch
import symmerge as sm
from symmerge.distributed import process_group
from symmerge.lab.small_models import small_model
from symmerge.matching.learned import LearnedMatching
from symmerge.models.alignment import Alignment

options = {"dtype": torch.float64, "num_hidden_layers": 1}
a, b = (sm.canonicalize(sm.load(small_model("llama", seed=seed, **options))) for seed in (0, 1))
task = sm.make_task("clm", "self", [a, b], samples=24)
start = Alignment.random(a.spec, torch.Generator().manual_seed(5))
with process_group() as (rank, processes):
    assert processes == 2
    solution = LearnedMatching(data=task, start=start, steps=12, batch_size=6, lr=1e-2).solve(a, b)
    solution.alignment.save(sys.argv[1] + f"/alignment.{rank}")
    record = json.dumps([solution.objective, solution.settings["learned"]])
    open(sys.argv[1] + f"/{rank}.json", "w").write(record)
"""


def test_two_processes_learn_what_one_does(tmp_path):
    """Each looks at one batch a step where the one looks at two; flips included."""
    (tmp_path / "run.py").write_text(SCRIPT)
    run_script_in_two(tmp_path / "run.py", tmp_path)
    one, other = learn("llama", steps=12, accumulate=2), learn("llama", steps=12)
    found = [Alignment.load(tmp_path / f"alignment.{rank}", ready("llama").spec) for rank in (0, 1)]
    assert (
        not apart(*found) and (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    )
    objective, learned = json.loads((tmp_path / "0.json").read_text())
    assert (
        objective == pytest.approx(one.objective, rel=1e-5) and learned == one.settings["learned"]
    )
    for space, element in one.alignment.elements.items():
        for part, value in element.items():
            torch.testing.assert_close(found[0][space][part], value, rtol=1e-3, atol=1e-4)
    assert other.objective != pytest.approx(
        one.objective, rel=1e-5
    )  # the control: one batch is not two
