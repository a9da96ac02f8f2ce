"""The figures of the report show what the results say."""

from importlib.util import module_from_spec, spec_from_file_location

from documents import ROOT


def test_the_figures_of_the_report_are_current(monkeypatch):
    spec = spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert not list(tool.out_of_date()), "run python tools/figures.py"
    monkeypatch.setattr(tool, "PARTS", tool.PARTS[::-1])
    assert list(tool.out_of_date()) == ["results-retrained.svg"]
