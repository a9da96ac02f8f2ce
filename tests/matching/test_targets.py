"""What a merge is to answer: the mean of its parents, or of those who know the text."""

import pytest
import torch

import symmerge as sm
from symmerge.evaluation.tasks import make_task
from symmerge.evaluation.tasks.base import IGNORED
from symmerge.lab.small_models import small_model
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.options import DataOptions
from symmerge.matching.learning.targets import disagreement, joint_answer

ROWS, LENGTH, TOKENS = 3, 5, 7


@pytest.fixture(scope="module")
def parents():
    """Logits of two parents that disagree, and the text they answer."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, ROWS * LENGTH, TOKENS, generator=generator)
    return list(logits), torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)


def test_bayes_is_the_exact_conditional_of_the_ensemble_of_authors(parents):
    """P(next | so far) = sum of joint probabilities with the next token / without it."""
    logits, text = parents
    answer = joint_answer(logits, "bayes", text, causal=True).view(ROWS, LENGTH, TOKENS)
    each = [one.softmax(-1).view(ROWS, LENGTH, TOKENS) for one in logits]
    for row in range(ROWS):
        joint = torch.ones(2)  # of what was read, by author
        for place in range(LENGTH):
            ahead = torch.stack([one[row, place] for one in each])
            exact = (joint[:, None] * ahead).sum(0) / joint.sum()
            torch.testing.assert_close(answer[row, place], exact, rtol=1e-4, atol=1e-6)
            if place + 1 < LENGTH:
                joint = joint * ahead[:, text[row, place + 1]]
    mean = joint_answer(logits, "parents", text, causal=True).view(ROWS, LENGTH, TOKENS)
    assert torch.allclose(answer[:, 0], mean[:, 0]) and not torch.allclose(answer, mean, atol=1e-2)


def test_an_author_answers_for_the_whole_row(parents):
    logits, text = parents
    answer = joint_answer(logits, "author", text, causal=True).view(ROWS, LENGTH, TOKENS)
    each = torch.stack([one.log_softmax(-1).view(ROWS, LENGTH, TOKENS) for one in logits])
    seen = each[:, :, :-1].gather(-1, text[:, 1:, None].expand(2, -1, -1, 1)).sum((2, 3))
    expected = (seen.softmax(0)[..., None, None] * each.exp()).sum(0)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-6)


def test_of_a_masked_text_only_the_labels_tell(parents):
    logits, text = parents
    masked = torch.full_like(text, IGNORED)
    masked[0, 1], masked[2, 0], masked[2, 3] = 1, 2, 3
    places = [one[[1, 10, 13, 13]] for one in logits]  # the last one is padding
    answer = joint_answer(places, "author", masked, causal=False)
    known = torch.stack([one.log_softmax(-1) for one in places])
    alone = known[:, 0, 1].softmax(0)
    both = (known[:, 1, 2] + known[:, 2, 3]).softmax(0)
    for at, weight in ((0, alone), (1, both), (2, both)):
        expected = (weight[:, None] * known[:, at].exp()).sum(0)
        torch.testing.assert_close(answer[at], expected, rtol=1e-4, atol=1e-6)


def test_parents_disagree_if_each_knows_rows_of_its_own():
    apart = disagreement(torch.tensor([[-1.0, -1.0, -4.0, -4.0], [-4.0, -4.0, -1.0, -1.0]]))
    assert apart == pytest.approx(3)
    better = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]])  # the control: one is better everywhere
    assert disagreement(better) == pytest.approx(0)
    assert disagreement(better[:1]) == 0
    three = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-3.0, 1.0]])
    assert disagreement(three) == pytest.approx(2)


def scaled(seed, factor):
    """A small model whose predictions are as sharp as the factor is large."""
    model = small_model("gpt2", seed=seed)
    model.load_state_dict({name: factor * value for name, value in model.state_dict().items()})
    return sm.load(model)


@pytest.mark.parametrize(("factor", "chosen"), [(0.1, "parents"), (2, "bayes")])
def test_the_target_is_chosen_by_the_text(factor, chosen):
    models = [scaled(seed, factor) for seed in (0, 1)]
    task = make_task("clm", "self", models, samples=16, length=12)
    options = DataOptions(data=task, batch_size=4, held_out=0.5)
    assert load_data(options, models, lambda line: None).train.target == chosen
