"""Secrets in a class's output, no matter how the output is split."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from workers.models.custom.printed import HIDDEN, HiddenValues, KeptText, PrintedOutput

SHORT, LONG, OTHER = "abcabc", "abcabcde", "deabcz"
VALUES = [SHORT, LONG, OTHER]


@given(st.lists(st.sampled_from([*VALUES, "x", " ", "abc", "de"]), max_size=6), st.data())
def test_text_in_pieces_is_cleared_like_the_whole_text(
    parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    whole, pieces = KeptText(HiddenValues(VALUES)), KeptText(HiddenValues(VALUES))
    whole.add(text.encode())
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces.add(text[begin:end].encode())
    cleared = pieces.take().text
    assert cleared == whole.take().text == HiddenValues(VALUES).clear(text)
    assert not any(value in cleared for value in VALUES)


def test_a_secret_that_begins_another_is_held_until_the_other_is_ruled_out() -> None:
    log = KeptText(HiddenValues(VALUES))
    log.add(SHORT.encode())
    assert log.look().text == ""
    log.add(b"de")
    assert log.take().text == HIDDEN


def test_the_operators_log_gets_no_half_of_a_secret_between_two_looks() -> None:
    read, write = os.pipe()
    printed = PrintedOutput(read, hidden=HiddenValues([LONG]))
    os.write(write, f"ready {LONG[:4]}".encode())
    assert printed.take_cleared().text == "ready "
    os.write(write, LONG[4:].encode())
    assert printed.take_cleared().text == HIDDEN
    os.close(write)
    printed.close()
