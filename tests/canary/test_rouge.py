"""ROUGE-L: computed by hand for the paper's example, and compared with the textbook's table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dispatch.closeness import rouge_l


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        # Lin (2004), section 3.1: S1 compared with S2 and S3.
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("police killed the gunman", "the gunman kill police", 0.5),
        ("one", "one", 1.0),
        ("one", "two", 0.0),
        ("", "", 1.0),
        (" ", "\n", 1.0),
        ("", "one", 0.0),
        ("a b c d", "a c", 2 * 2 / 6),
        ("yes.", "yes!", 0.5),
        ("東京は都市", "東京も都市", 0.8),
    ],
)
def test_known_scores(ours: str, theirs: str, expected: float) -> None:
    assert rouge_l(ours, theirs) == pytest.approx(expected)


WORDS = st.lists(st.sampled_from("abcd"), max_size=80)


@given(WORDS, WORDS)
def test_it_is_that_of_the_table(first: list[str], second: list[str]) -> None:
    table = [0] * (len(second) + 1)
    for one in first:
        above_left = 0
        for place, other in enumerate(second, 1):
            found = above_left + 1 if one == other else max(table[place], table[place - 1])
            above_left, table[place] = table[place], found
    expected = 2 * table[-1] / (len(first) + len(second)) if first or second else 1.0
    assert rouge_l(" ".join(first), " ".join(second)) == pytest.approx(expected)
