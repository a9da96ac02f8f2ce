"""Tutorials run: their marked blocks, one after the other, on small models."""

import pytest
from documents import DOCS, PAGES, Block, blocks

RUN = {
    page.relative_to(DOCS): blocks(page.read_text("utf-8"))
    for page in PAGES
    if DOCS in page.parents
}
RUN = {str(name): found for name, found in RUN.items() if found}


@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in RUN[name]:
        if block.possible():
            block.execute()


def test_every_tutorial_runs():
    tutorials = {str(page.relative_to(DOCS)) for page in (DOCS / "tutorials").glob("*.md")}
    assert tutorials and tutorials <= {*RUN}


def test_a_block_that_fails_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "<!-- run -->\n```bash\nsymmerge inspect nowhere\n```\n```bash\nsymmerge x\n```\n"
    (block,) = blocks(page)
    with pytest.raises(AssertionError, match="nowhere"):
        block.execute()
    Block("bash", "# a comment\nsymmerge inspect nowhere  # exit code 2").execute()
    with pytest.raises(AssertionError, match="only symmerge"):
        Block("bash", "touch file").execute()
    with pytest.raises(ZeroDivisionError):
        Block("python", "1 / 0").execute()


def test_a_block_that_needs_another_verb_is_left_out():
    (block,) = blocks("<!-- run needs=fly -->\n```bash\nsymmerge fly\n```\n")
    assert not block.possible() and Block("bash", "", "merge").possible()
