"""The table of architectures says what the code says."""

from importlib.util import module_from_spec, spec_from_file_location

from documents import ROOT


def test_the_table_of_architectures_is_current():
    spec = spec_from_file_location("architectures", ROOT / "tools" / "architectures.py")
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.DOCUMENT.read_text("utf-8")
    assert tool.with_tables(text) == text, "run python tools/architectures.py"
    assert "`qwen2`" in text and tool.with_tables(text.replace("`qwen2`", "`qwen9`")) == text
