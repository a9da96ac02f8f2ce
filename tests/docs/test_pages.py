"""Documents hold together: links, anchors, the README's size, tables that come from the code."""

import re

import pytest
import yaml
from documents import DOCS, LINK, PAGES, ROOT, anchors, broken_links, links

README = (ROOT / "README.md").read_text("utf-8")
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_noticed():
    page = DOCS / "index.md"
    text = "# One\n[a](faq.md) [b](fqa.md) [c](#one) [d](#two) [e](faq.md#exit-codes) [f](faq.md#x)"
    assert broken_links(page, text) == ["fqa.md", "#two", "faq.md#x"]
    assert broken_links(page, "[away](../../elsewhere) [code](https://example.org)") == [
        "../../elsewhere"
    ]


def test_anchors_are_those_of_every_renderer():
    assert anchors("# Two: `words`, one [link](x.md)\n```\n# code\n```") == {"two-words-one-link"}
    assert "a--b" not in anchors("# a - b")  # the site has a-b, forges have a---b


def test_links_in_code_are_not_links():
    assert links("`[a](b)` [c](d)\n```\n[e](f)\n```\n") == ["d"]
    assert LINK.findall("[a](b)") == ["b"]


def test_the_readme_is_short():
    assert len(README.encode()) <= 7_000


def test_a_merge_is_two_commands_and_few_words_away():
    before = README.partition("The merge ends with a verdict")[0]
    assert len(before.split()) <= 250
    commands = re.findall(r"^(?:pip|symmerge) .*$", before, re.M)
    assert [line.split()[0] for line in commands] == ["pip", "symmerge"]


def test_the_readme_keeps_its_two_commands():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("demo", "test"):
        assert f"make {target} " in README and re.search(rf"^{target}:", makefile, re.M)


def test_every_page_is_in_the_navigation():
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader=yaml.BaseLoader)
    listed = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    pages = {str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents}
    assert {name for name in listed if not name.startswith("project/")} == pages
    assert len(listed) == len({*listed})


def test_papers_are_named():
    single = re.compile(r"\b([TVF]'s|paper [TVF]|experiments of [TVF])\b|\((T|V|F)(, [^)]*)?\)")
    assert single.search("T's table") and single.search("heads (V, Table 1)")
    for page in PAGES:
        assert not single.search(page.read_text("utf-8")), page
