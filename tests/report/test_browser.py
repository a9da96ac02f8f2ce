"""The page in a real browser, where there is one."""

import pytest
from chromium import FOUND, chromium
from report_data import (
    CORRELATIONS,
    NASTY,
    SOLUTION,
    STRUCTURE,
    curve,
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
