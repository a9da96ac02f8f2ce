"""The page in a real browser, where there is one."""

import base64
import re

import pytest
from chromium import FOUND, chromium
from contrast import contrast
from report_data import (
    CORRELATIONS,
    NASTY,
    SOLUTION,
    STRUCTURE,
    curve,
    demo_like,
    write,
)

from symmerge.report import report


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_in_a_browser(tmp_path):
    record = curve()
    record["methods"][1]["label"] = NASTY
    results = write(
        tmp_path / "results",
        curve=record,
        structure=STRUCTURE,
        correlations=CORRELATIONS,
        solution=SOLUTION,
    )
    file = report(results, tmp_path / "page.html")
    with chromium() as browser:
        browser.open(file)
        cells = "[...document.querySelectorAll('.now .plain td')].map(cell => cell.textContent)"
        place = "document.querySelector('[id$=loss-cursor]').getBoundingClientRect().x"
        before, cursor = browser.run(cells), browser.run(place)
        assert before[0] == "4.220"
        browser.run("document.querySelector('input[type=range]').focus()")
        browser.press("ArrowRight", 39)
        after = browser.run(cells)
        assert after[0] == "4.198" and after[1] != before[1] and browser.run(place) > cursor
        assert (
            browser.run(
                "document.querySelector('input[type=range]').getAttribute('aria-valuetext')"
            )
            == "t = 0.55"
        )
        assert "loss 4.198" in browser.run("document.querySelector('[aria-live]').textContent")

        column = (
            "[...document.querySelectorAll('[aria-labelledby$=now] tbody tr')]"
            ".map(row => row.cells[1].textContent)"
        )
        click = "document.querySelectorAll('[aria-labelledby$=now] thead button')[1].click()"
        orders = [browser.run(f"{click}, {column}") for _ in range(2)]
        assert (
            orders[0] == sorted(orders[0], key=float) == orders[1][::-1] and orders[0] != orders[1]
        )
        assert (
            browser.run("document.querySelectorAll('[aria-labelledby$=now] thead th')[1].ariaSort")
            == "descending"
        )
        assert not browser.complaints()

        colours = []
        for dark in (False, True):
            browser.open(file, width=360, height=740, dark=dark)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (
                "the page scrolls sideways on a phone"
            )
            colours.append(
                browser.run(
                    "['body', 'svg text'].map(at => getComputedStyle(document.querySelector(at)))"
                    ".map(style => style.backgroundColor + style.fill)"
                )
            )
        assert colours[0][0] != colours[1][0] and colours[0][1] != colours[1][1], (
            "light and dark differ, in the page and in the figures"
        )
        assert not browser.complaints()


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_the_browser_notices_mistakes(tmp_path):
    file = tmp_path / "bad.html"
    file.write_text(
        "<div style='width: 5000px'>wide</div><img src='other.png'><script>undefined.x</script>"
    )
    with chromium() as browser:
        browser.open(file, width=360, height=740)
        assert not browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert len(browser.complaints()) >= 2


SIZES = {"desk": (1280, 800), "phone": (390, 844)}
MAX_HEIGHT = 5000  # pixels, as the page opens
# Every text that is seen: its colour on the first background below it, and its size.
TEXTS = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), seen = [];
  while (walker.nextNode()) {
    const at = walker.currentNode.parentElement, style = getComputedStyle(at);
    if (!walker.currentNode.textContent.trim() || !at.checkVisibility()) continue;
    let below = at, back;
    do { back = getComputedStyle(below).backgroundColor; below = below.parentElement; }
    while (below && back === 'rgba(0, 0, 0, 0)');
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const colour = at.closest('svg') ? style.fill : style.color;
    seen.push([walker.currentNode.textContent.trim(), colour, back, size, bold]);
  }
  return seen;
})()"""


def lowest_contrast(browser):
    """The text closest to failing: its contrast over what its size demands, and the text."""
    ratios = []
    for text, colour, back, size, bold in browser.run(TEXTS):
        front, behind = (
            "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", one)[:3])
            for one in (colour, back)
        )
        large = size >= 24 or (bold and size >= 18.66)
        ratios.append((contrast(front, behind) / (3.0 if large else 4.5), text))
    return min(ratios)


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
@pytest.mark.parametrize("size", SIZES)
def test_a_page_of_the_demos_size_is_short_and_can_be_read(tmp_path, size):
    width, height = SIZES[size]
    file = report(demo_like(tmp_path / "demo"), tmp_path / "page.html")
    with chromium() as browser:
        for dark in (False, True):
            browser.open(file, width=width, height=height, dark=dark)
            assert browser.run("document.documentElement.scrollHeight") <= MAX_HEIGHT
            assert lowest_contrast(browser)[0] >= 1, lowest_contrast(browser)
        # The controls: open, it is much longer; with a grey of its own, a text fails.
        browser.run("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
        assert browser.run("document.documentElement.scrollHeight") > 2 * MAX_HEIGHT
        assert lowest_contrast(browser)[0] >= 1, "in the folds, too"
        browser.run("document.querySelector('.summary').style.color = 'rgb(120, 120, 120)'")
        assert lowest_contrast(browser)[0] < 1
        assert not browser.complaints()


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_a_wide_table_says_so_on_a_phone(tmp_path):
    file = report(demo_like(tmp_path / "demo"), tmp_path / "page.html")
    hint = "document.querySelector('.now .swipe').checkVisibility()"
    scrolls = "(at => at.scrollWidth > at.clientWidth)(document.querySelector('.now .scroll'))"
    shade = "getComputedStyle(document.querySelector('.now .scroll')).backgroundImage"
    with chromium() as browser:
        browser.open(file, width=320, height=700)
        assert browser.run(scrolls) and browser.run(hint)
        assert browser.run(shade).count("linear-gradient") == 4
        browser.open(file, width=1280, height=800)  # the control
        assert not browser.run(scrolls) and not browser.run(hint)


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_the_page_works_without_scripts_and_from_the_keyboard(tmp_path):
    file = report(demo_like(tmp_path / "demo"), tmp_path / "page.html")
    opened = "[...document.querySelectorAll(':popover-open')].map(one => one.id)"
    with chromium() as browser:
        browser.send("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(file, width=1280, height=800)
        assert browser.run("document.querySelector('.slider').hidden")
        assert browser.run("document.querySelector('.now .best td').textContent") == "1.550"
        browser.run("document.querySelector('.summary .term').focus()")
        browser.press("Enter", 13, text="\r")
        assert browser.run(opened) == ["word-alignment"]
        browser.press("Escape", 27)
        assert browser.run(opened) == []
        browser.run("document.querySelector('.folds summary').focus()")
        assert not browser.run("document.querySelector('.folds details').open")
        browser.press("Enter", 13, text="\r")
        assert browser.run("document.querySelector('.folds details').open")


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_the_page_prints_on_few_sheets_without_controls(tmp_path):
    file = report(demo_like(tmp_path / "demo"), tmp_path / "page.html")
    with chromium() as browser:
        browser.open(file, width=1280, height=800, dark=True)
        printed = base64.b64decode(browser.send("Page.printToPDF", printBackground=True)["data"])
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) <= 4
        browser.send("Emulation.setEmulatedMedia", media="print")
        gone = "['.slider', '.folds details', 'nav'].map(at => document.querySelector(at))"
        assert browser.run(f"{gone}.every(one => !one.checkVisibility())")
        colours = "getComputedStyle(document.body).backgroundColor"
        assert browser.run(colours) == "rgb(255, 255, 255)", "paper is white"
