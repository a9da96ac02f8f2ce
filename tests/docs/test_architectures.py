"""The table of architectures says what the code says."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def tool():
    spec = spec_from_file_location("architectures", ROOT / "tools" / "architectures.py")
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_table_of_architectures_is_current(tool):
    text = tool.DOCUMENT.read_text("utf-8")
    assert tool.with_tables(text) == text, "run python tools/architectures.py"
    assert "`qwen2`" in text and tool.with_tables(text.replace("`qwen2`", "`qwen9`")) == text


def test_every_row_says_what_the_layers_may_do(tool):
    rows = [line.split(" | ") for line in tool.variants_table().splitlines()[2:]]
    assert rows and not [row for row in rows if not all(cell.strip() for cell in row[4:8])]
    pairs = "one complex number per rotary pair"
    assert tool.row("llama")[4:8] == (
        "rotations",
        pairs,
        "any change of basis",
        "permutations, scales",
    )
    whisper = tool.row("whisper")[4]
    assert whisper == "decoder: rotations that fix the ones vector; encoder: permutations"
