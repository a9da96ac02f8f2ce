"""The tests check types and shapes of symmerge's functions, where `conftest.py` says so."""

from pathlib import Path

import pytest
import torch
from type_checks import CALLS, is_checked

from symmerge.symmetry.groups import Orthogonal

pytestmark = pytest.mark.quick


def test_a_wrong_type_is_noticed_here():
    assert is_checked(Path(__file__))
    with pytest.raises(Exception, match="type"):
        Orthogonal(3).inverse(torch.eye(3))  # an element is a dictionary


def test_a_wrong_type_is_noticed_in_the_last_call_that_is_checked():
    group, element = Orthogonal(3), {"matrix": torch.eye(3)}
    for _ in range(CALLS - 1):
        group.inverse(element)
    with pytest.raises(Exception, match="type"):
        group.inverse({"matrix": "a matrix"})


def test_commands_and_the_laboratory_are_not_checked_again():
    tests = Path(__file__).parent
    assert not is_checked(tests / "lab" / "test_demonstration.py")
    assert is_checked(tests / "matching" / "test_gradients.py")
