"""symmerge.json is read back as it was written; what does not fit is refused."""

import pytest

import symmerge as sm
from symmerge.checkpoints.files import read_json, write_json
from symmerge.checkpoints.provenance import Provenance
from symmerge.errors import SymmergeError
from symmerge.lab.small_models import small_model
from symmerge.merging.means import average
from symmerge.models.orbit import random_member
from symmerge.models.saving import provenance_of


@pytest.fixture(scope="module")
def merged():
    model = sm.load(small_model("gpt2-untied"))
    other = sm.canonicalize(sm.load(small_model("gpt2-untied", seed=1)), ("fold",))
    return average(sm.canonicalize(model, ("fold",)), other, evidence={"score": 0.5})


def test_the_record_is_read_back(merged, tmp_path):
    sm.save(merged, tmp_path / "merged")
    file = tmp_path / "merged" / "symmerge.json"
    record = Provenance.read(file)
    assert record == provenance_of(merged, None) and record.to_json() == read_json(file)
    step = record.steps[-1]
    assert [parent.weight for parent in step.parents] == [0.5, 0.5]
    assert step.parents[1].steps[0].step == "fold" and step.evidence == {"score": 0.5}
    write_json(file, {**record.to_json(), "mood": "good"})
    with pytest.raises(SymmergeError, match="'mood'"):
        Provenance.read(file)


def test_the_verdict_is_part_of_it(tmp_path):
    model = sm.load(small_model("llama"))
    verdict = sm.verify(model, random_member(model)[1])
    sm.save(model, tmp_path / "model", gate=lambda written, computed: verdict)
    assert Provenance.read(tmp_path / "model" / "symmerge.json").verified == verdict
