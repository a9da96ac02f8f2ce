"""The page of several models that were brought together, or measured pair by pair."""

import re

from report_data import (
    NASTY,
    Outline,
    pairs_of,
    said,
    summary_of,
    together,
)

from symmerge.evaluation.results import SimplexFile
from symmerge.report import simplex_svgs
from symmerge.report.simplices import pair_matrices


def test_several_models_together_in_words_numbers_and_figures(page):
    text = page(simplex=together())
    assert (
        "Averaging all 4 models as they are raises the loss from 1.52 to 11.5;"
        " after alignment (weight matching) the loss is 2.50." in said(text)
    )
    assert (
        "Causal language modelling on python-docs, 4 models" in text
        and "the first three models" in text
    )
    for shown in (
        "s1-many-triangle0-",
        "s1-many-triangle1-",
        "s1-many-barriers0-",
        "s1-many-barriers1-",
        "s1-many-count-",
    ):
        assert shown in text, shown
    # barriers of pairs, spreads, rounds, nested settings, what was merged
    for shown in (
        "4.167",
        "7.500",
        "0.7654",
        "0.6542",
        "3.00e-08",
        "first.max_sweeps",
        "ensemble of all 4",
        "seed-3 alone",
        "c" * 64,
        "torch 2.x",
    ):
        assert shown in text, shown
    row = text.partition("The search for common coordinates")[2].partition("</tbody>")[0]
    assert re.findall(r">([^<>]+)</t[hd]>", row)[-7:] == [
        "weight matching",
        "0.7654",
        "0.6542",
        "2",
        "1",
        "3",
        "3.00e-08",
    ]
    assert [
        words for words in ("What a barrier is", 'type="range"', 'data-curve="') if words in text
    ] == []
    alone = together()
    alone["methods"] = alone["methods"][:1]
    bare = page(simplex=alone)
    assert (
        "common coordinates" not in bare
        and "Settings of the methods" not in bare
        and "Averaging all 4 models as they are raises" in bare
    )


def test_pages_of_several_models_find_their_way_and_escape(page):
    record = together()
    record["models"][0]["where"] = record["methods"][1]["label"] = record["methods"][1]["name"] = (
        NASTY
    )
    text = page(simplex=record)
    outline = Outline(text)
    assert (
        "<script>alert" not in text
        and "<img" not in text
        and text.count("</script>") == 2
        and "model 0" in text
    )
    assert all(
        after <= before + 1
        for before, after in zip(outline.headings, outline.headings[1:], strict=False)
    ) and outline.references <= set(outline.ids)
    assert (
        len(outline.ids) == len(set(outline.ids))
        and outline.tags.count("svg") == outline.tags.count("desc") == 6  # one in both widths
        and outline.tags.count("figcaption") == 5
    )
    files = simplex_svgs(SimplexFile.from_json(record))
    assert len(files) == 5 and all(re.fullmatch(r"[\w.-]+\.svg", name) for name in files)
    assert all(
        "prefers-color-scheme: dark" in svg and "<script>alert" not in svg for svg in files.values()
    )


def test_many_models_get_maps_one_below_the_other(page):
    few, many = page(simplex=together(count=5)), page(simplex=together(count=6))
    assert "<summary>Barrier over the mean" in many and "<summary>Barrier over the mean" not in few
    assert (
        few.count('class="beside"') == 2
        and many.count('class="beside"') == 1
        and "s1-many-barriers1-" in many
    )


def test_all_pairs_of_several_models_have_a_map_of_barriers(page):
    text = page(curve=pairs_of([(0, 1), (2, 0), (1, 2)]))
    assert (
        "Barriers between every two models" in text
        and "s1-barriers0-" in text
        and "s1-barriers1-" in text
    )
    _, matrices = pair_matrices(summary_of(pairs_of([(0, 1), (2, 0), (1, 2)])))
    assert matrices[0].label == "plain average"
    assert matrices[0].values == [[0, 1.125, 2.125], [1.125, 0, 3.125], [2.125, 3.125, 0]]
    for ends in (
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(0, 1), (0, 1), (1, 2)],
        [(0, 1), (1, 0), (0, 2)],
        [(0, 1), (2, 3), (4, 5)],
    ):  # the controls
        assert "every two models" not in page(curve=pairs_of(ends)), ends
