"""A file's lines are the same no matter how its bytes are split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.batch_runner.lines import BYTE_ORDER_MARK, Line, LineSplitter

LONGEST = 20
PIECES = st.sampled_from(
    [
        *(b"\n", b"\r\n", b"\r", b" ", b"\t", b"\0", b"{}", b'{"a": "\xc3\xbc"}', b"\xff"),
        *(BYTE_ORDER_MARK, b"\xe2\x80\xa8", b"x" * 19, b"x" * 20, b"x" * 21, b"x" * 60),
    ]
)
FILES = st.lists(PIECES, max_size=40).map(b"".join)


def expected(data: bytes) -> list[Line]:
    """The expected lines, found by reading the whole file at once."""
    lines, offset = [], 0
    for number, raw in enumerate(data.split(b"\n"), 1):
        text = raw.removesuffix(b"\r")
        text = text.removeprefix(BYTE_ORDER_MARK)
        kept = None if len(text) > LONGEST else text
        if text.strip(b" \t\r"):
            lines.append(Line(number, offset, kept))
        offset += len(raw) + 1
    return lines


def split(pieces: Sequence[bytes], splitter: LineSplitter | None = None) -> list[Line]:
    splitter = splitter or LineSplitter(LONGEST)
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    return lines + splitter.finish()


@given(FILES, st.lists(st.integers(0, 400), max_size=20))
@example(BYTE_ORDER_MARK + b"x" * LONGEST + b"\r\n", [1, 4])
def test_cuts_do_not_matter(data: bytes, cuts: list[int]) -> None:
    at = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(at)]
    assert split(pieces) == expected(data)
    assert split([data[n : n + 1] for n in range(len(data))]) == expected(data)


@given(FILES, st.integers(0, 40))
def test_reading_goes_on_at_any_line(data: bytes, which: int) -> None:
    lines = expected(data)
    for line in lines[which : which + 1]:
        later = LineSplitter(LONGEST, number=line.number, offset=line.offset)
        assert split([data[line.offset :]], later) == lines[which:]


@given(FILES)
def test_offsets_lead_to_the_line(data: bytes) -> None:
    for line in split([data]):
        if line.data is not None:
            found = data[line.offset :].removeprefix(BYTE_ORDER_MARK)
            assert found.startswith(line.data)


def test_endless_line_is_not_held() -> None:
    splitter = LineSplitter(1000)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._held) <= 1004
    assert splitter.feed(b"\n{}\n") == [Line(1, 0, None), Line(2, 1_000_001, b"{}")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_writer_come_back(end: str) -> None:
    texts = ["a", "ü", "\u2028", "日本", "\\n", "\x00"]
    data = "".join(json.dumps({"t": text}, ensure_ascii=False) + end for text in texts).encode()
    found = [json.loads(line.data or b"") for line in LineSplitter().feed(data)]
    assert [one["t"] for one in found] == texts
