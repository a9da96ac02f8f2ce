"""Tensors that are computed once, and stay in memory or in a scratch file."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from symmerge.checkpoints.scratch import ComputedOnce, Scratch, computed_once
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights

pytestmark = pytest.mark.quick
TENSORS = {name: torch.full((2, 3), float(number)) for number, name in enumerate("abcdef")}
EACH = TENSORS["a"].nbytes


def counted(computed):
    def compute(name):
        computed.append(name)
        return TENSORS[name]

    return DerivedWeights(
        MemoryWeights(TENSORS), {name: (lambda name=name: compute(name)) for name in TENSORS}
    )


def test_tensors_that_fit_are_computed_once():
    computed = []
    once = ComputedOnce(counted(computed), room=3 * EACH)
    for _ in range(2):
        for name in TENSORS:
            assert torch.equal(once[name], TENSORS[name])
    assert sorted(computed) == sorted("abc" + 2 * "def")  # control: the others are not kept


def test_threads_that_ask_at_once_share_a_tensor():
    computed, asked = [], threading.Barrier(2)

    def compute():
        computed.append("a")
        asked.wait(5)  # until the other has asked, too
        time.sleep(0.05)
        return TENSORS["a"]

    once = ComputedOnce(DerivedWeights(MemoryWeights(TENSORS), {"a": compute}), room=0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.__getitem__, "a")
        asked.wait(5)
        assert torch.equal(once["a"], TENSORS["a"])
        assert torch.equal(first.result(), TENSORS["a"])
    assert computed == ["a"]


def test_what_cannot_be_computed_is_tried_again():
    results = iter([RuntimeError("full"), TENSORS["a"]])

    def compute():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    once = ComputedOnce(DerivedWeights(MemoryWeights(TENSORS), {"a": compute}), room=100)
    with pytest.raises(RuntimeError, match="full"):
        once["a"]
    assert torch.equal(once["a"], TENSORS["a"])


def test_what_does_not_fit_in_memory_is_mapped_from_a_file(tmp_path):
    computed = []
    once = ComputedOnce(counted(computed), 2 * EACH, Scratch(tmp_path, most=3 * EACH))
    for _ in range(2):
        for name in TENSORS:
            assert torch.equal(once[name], TENSORS[name])
    assert sorted(computed) == sorted("abcdef" + "f")  # control: the file is full before the last
    once["d"].add_(1)  # whoever writes into a tensor does not write into the file
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_full_disk_is_no_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("symmerge.checkpoints.scratch.write_all", full)
    computed = []
    once = ComputedOnce(counted(computed), 0, Scratch(tmp_path, most=1000))
    assert all(torch.equal(once[name], once[name]) for name in TENSORS)
    assert len(computed) == 2 * len(TENSORS)


def test_nothing_is_written_where_memory_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr("symmerge.checkpoints.scratch.Scratch", pytest.fail)
    computed = []
    once = computed_once(counted(computed), tmp_path)
    assert all(torch.equal(once[name], once[name]) for name in TENSORS)
    assert len(computed) == len(TENSORS)
