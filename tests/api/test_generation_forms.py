"""Log probabilities in the completions format."""

import pytest

from api.openai.generation import completion_logprobs
from shared.models.tasks.text import TokenLogprob


def told(data: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(data.decode(errors="replace"), logprob, data, list(top))


@pytest.mark.parametrize(
    ("top", "wanted"),
    [
        ([], {"a": -3.0}),
        ([told(b"b", -1.0)], {"b": -1.0, "a": -3.0}),
        ([told(b"a", -3.0), told(b"b", -4.0)], {"a": -3.0, "b": -4.0}),
        # Partial characters, which all look the same as text
        (
            [told(b"\xe2", -1.0), told(b"\xe3", -2.0)],
            {"bytes:\\xe2": -1.0, "bytes:\\xe3": -2.0, "a": -3.0},
        ),
        # Two tokens with the same text
        ([told(b"a", -1.0), told(b"b", -2.0)], {"bytes:\\x61": -1.0, "b": -2.0, "a": -3.0}),
        (
            [told(b"c", -1.0), told(b"c", -2.0), told(b"c", -2.5)],
            {"c": -1.0, "bytes:\\x63": -2.0, "bytes:\\x63 ": -2.5, "a": -3.0},
        ),
    ],
    ids=str,
)
def test_alternatives_have_the_token_itself_and_lose_none(
    top: list[TokenLogprob], wanted: dict[str, float]
) -> None:
    (found,) = completion_logprobs([told(b"a", -3.0, *top)], 0).top_logprobs
    assert found == wanted


def test_offsets_are_places_in_the_text() -> None:
    given = [told(one, -1.0) for one in (b"a", b"\xe2\x82", b"\xac", b"b\xff", b"c")]
    text = b"".join(one.data for one in given).decode(errors="replace")
    found = completion_logprobs(given, 10)
    assert found.text_offset == [10, 11, 11, 12, 14]
    assert [text[at - 10 :][:1] for at in found.text_offset] == ["a", "\u20ac", "\u20ac", "b", "c"]
    assert found.tokens == ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "bytes:\\x62\\xff", "c"]
