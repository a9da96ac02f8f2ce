"""A page of result files that a test makes by hand."""

import pytest
from report_data import (
    write,
)

from symmerge.report import report


@pytest.fixture
def page(tmp_path):
    """The text of the page of some result files."""
    return lambda **files: report(
        write(tmp_path / "results", **files), tmp_path / "page.html"
    ).read_text("utf-8")
