"""Opens documents in a separate process and assembles pages from their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.ocr.assembly import (
    Box,
    Line,
    Region,
    Wishes,
    Word,
    blocks_of,
    in_order,
    line_of,
    markdown_table,
    page_of,
    straightened,
)
from examples.ocr.document import Document, InvalidInput
from tests.documents import hostile_files, odd_files, pages_pdf, report, report_pages, shown, stream
from tests.limits import WAIT_LIMIT_S

HEAVY = ("content-bomb", "form-loop", "many-objects", "object-stream")
"""Files that are rejected only after more than a second of CPU time."""
HEIGHT = 1650


@pytest.fixture(scope="module")
def hostile() -> dict[str, tuple[bytes, str]]:
    return hostile_files()


def read_all(path: Path) -> list[dict[str, Any]]:
    with Document(path) as document:
        pages = []
        for number in range(min(document.pages, 3)):
            pages.append(document.text(number))
            document.raster(number)
        return pages


@pytest.mark.parametrize(
    "name",
    [
        *("encrypted", "broken", "cut", "no-document", "empty-tree", "loop-of-pages"),
        *("many-pages", "gigapixel", "png-bomb", "tiff-bomb"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in HEAVY),
    ],
)
def test_a_hostile_file_is_an_error_of_its_document(
    name: str,
    hostile: dict[str, tuple[bytes, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, reason = hostile[name]
    path = tmp_path / "document"
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        read_all(path)
    assert caught.value.field == "document"
    assert reason in str(caught.value)
    path.write_bytes(report(report_pages(1)))
    monkeypatch.setattr("examples.ocr.document.OPENING_LIMIT_S", WAIT_LIMIT_S)  # a busy machine
    assert read_all(path)[0]["lines"][0]["words"][0][0] == "Chapter"


def test_odd_files_are_read(tmp_path: Path) -> None:
    for name, data in odd_files().items():
        path = tmp_path / "document"
        path.write_bytes(data)
        assert len(read_all(path)) == 1, name


def test_a_broken_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    good, bad = stream(b"", shown("fine", 72, 700, 12)), stream(b"", b"0 0 1 1 re f\n" * 200_001)
    path.write_bytes(pages_pdf([good, bad]))
    with Document(path) as document:
        assert document.text(0)["lines"]
        with pytest.raises(InvalidInput, match=r"^page 1: it has more than 200000 objects"):
            document.text(1)
        assert document.text(0)["lines"]


def test_page_with_too_much_text_is_the_callers_error(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    words = b"".join(shown("word " * 200, 72, 700 - n % 600, 1) for n in range(300))
    path.write_bytes(pages_pdf([stream(b"", words)]))
    with Document(path) as document:
        with pytest.raises(InvalidInput, match=r"^page 0: it has too much text") as caught:
            document.text(0)
        assert caught.value.field == "document"
        assert document.raster(0).width


def lines_at(*texts: tuple[str, int, int], size: int = 24) -> list[tuple[Box, Line]]:
    """Returns lines with the given upper left corners. A letter is half as wide as it is high."""
    placed = []
    for text, left, top in texts:
        box = (left, top, left + len(text) * size // 2, top + size)
        placed.append((box, line_of([Word(text, box)])))
    return placed


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.text for line in lines]


def test_columns_are_read_one_after_the_other() -> None:
    words = ["alpha beta gamma", "delta epsilon ze", "eta theta iota k", "lambda mu nu xi "]
    left_column = [(text, 100, 200 + 30 * row) for row, text in enumerate(words)]
    right_column = [(text.upper(), 700, 200 + 30 * row) for row, text in enumerate(words)]
    title = [("A title over both of the columns of it, from side to side", 100, 100)]
    both = [line for pair in zip(left_column, right_column, strict=True) for line in pair]
    assert texts(in_order(lines_at(*both, *title))) == [
        title[0][0],
        *words,
        *(text.upper() for text in words),
    ]


def test_parts_of_a_row_are_one_line() -> None:
    rows = lines_at(("Total:", 100, 100), ("342", 800, 104), ("Tax:", 100, 140), ("12", 800, 138))
    assert texts(in_order(rows)) == ["Total: 342", "Tax: 12"]


def test_lines_of_a_skewed_page_become_level() -> None:
    slope = 0.02
    quads = [
        [
            [x + across, y + down + slope * (x + across)]
            for across, down in ((0, 0), (400, 0), (400, 24), (0, 24))
        ]
        for x, y in ((100, 300), (900, 300), (100, 340), (900, 340))
    ]
    boxes = straightened(quads)
    assert abs(boxes[0][1] - boxes[1][1]) <= 2
    assert abs(boxes[2][1] - boxes[3][1]) <= 2


def page(lines: Sequence[Line], regions: Sequence[Region] = (), **wishes: Any) -> dict[str, Any]:
    size = {"dpi": 150, "height": HEIGHT, "width": 1275}
    blocks = blocks_of(lines, regions, HEIGHT)
    return page_of(0, size, blocks, (), Wishes(**wishes))


def plain(*placed: tuple[Box, Line]) -> list[Line]:
    return [line for _, line in placed]


def test_titles_paragraphs_and_lists() -> None:
    lines = plain(
        *lines_at(("Chapter", 100, 200), size=48),
        *lines_at(("one goes", 100, 300), ("on here", 100, 330)),
        *lines_at(("a second one", 100, 420)),
        *lines_at(("• point", 100, 500), ("goes on", 120, 530), ("2. point", 100, 560)),
    )
    assert page(lines)["markdown"] == (
        "# Chapter\n\none goes\non here\n\na second one\n\n- point\ngoes on\n2. point"
    )


def test_a_divided_word_is_one() -> None:
    lines = plain(*lines_at(("at-", 100, 300), ("least -", 100, 330), ("two", 100, 360)))
    assert page(lines)["markdown"] == "at-least -\ntwo"


def test_a_word_that_a_text_layer_divides_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(report([["Title", "the reser-", "voir of it"]]))
    with Document(path) as document:
        facts = document.text(0)
    lines = [[word[0] for word in line["words"]] for line in facts["lines"]]
    assert lines == [["Title"], ["the", "reser"], ["voir", "of", "it"]]
    assert [line["is_open"] for line in facts["lines"]] == [False, True, False]


def test_headers_and_footers_are_beside_the_markdown_if_asked() -> None:
    lines = plain(*lines_at(("Report", 100, 60), ("body", 100, 800), ("7", 600, 1600)))
    assert page(lines)["markdown"] == "Report\n\nbody\n\n7"
    result = page(lines, extract_header=True, extract_footer=True, include_blocks=True)
    assert (result["markdown"], result["header"], result["footer"]) == ("body", "Report", "7")
    assert [block["type"] for block in result["blocks"]] == ["header", "text", "footer"]


HTML = "<table><tr><td>a|b</td><td>c</td></tr><tr><td colspan='2'>d</td></tr></table>"


def test_tables_are_in_their_place() -> None:
    lines = plain(*lines_at(("above", 100, 300), ("in it", 100, 400), ("below", 100, 600)))
    table = Region("table", (90, 380, 900, 500), HTML, lines[1].words)
    as_markdown = "| a\\|b | c |\n| --- | --- |\n| d |  |"
    assert page(lines, [table])["markdown"] == f"above\n\n{as_markdown}\n\nbelow"
    beside = page(lines, [table], table_format="html", include_blocks=True)
    assert beside["markdown"] == "above\n\n[tbl-0.html](tbl-0.html)\n\nbelow"
    assert beside["tables"] == [{"id": "tbl-0.html", "content": HTML, "format": "html"}]
    assert [block.get("table_id") for block in beside["blocks"]] == [None, "tbl-0.html", None]
    assert markdown_table("<table></table>") == ""


def test_words_say_where_they_are_and_how_sure() -> None:
    word = Word("gate", (100, 300, 160, 324), 0.5)
    sure = page(
        [line_of([Word("the", (60, 300, 95, 324)), word])],
        (),
        **{"confidence_scores_granularity": "word"},
    )["confidence_scores"]
    assert sure["average_page_confidence_score"] == 0.75
    assert sure["word_confidence_scores"][1] == {
        "text": "gate",
        "confidence": 0.5,
        "start_index": 4,
    }
