"""The key format: which strings are keys, and which part of a key may be shown."""

import re
import zlib
from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from shared.errors import ConfigurationError
from shared.tenants.api_key import (
    ALPHABET,
    CHECKSUM_LENGTH,
    PATTERN,
    SECRET_LENGTH,
    checksum,
    new_key,
    parse_key,
    without_keys,
)
from shared.tenants.directory import Directory, decode_document

KEY = new_key()
PIECES = st.sampled_from(["pk_live_", "_", "0", "Az9", " ", "\n", "é", "\ud800", "０"])
NEAR_KEYS = st.one_of(
    st.text(max_size=90),
    st.lists(st.one_of(PIECES, st.text(ALPHABET, max_size=60)), max_size=6).map("".join),
    st.from_regex(PATTERN, fullmatch=True),
    st.just(KEY.text),
)


@given(NEAR_KEYS)
def test_parser_takes_keys_and_nothing_else(text: str) -> None:
    key = parse_key(text)
    start, end = text[:-CHECKSUM_LENGTH], text[-CHECKSUM_LENGTH:]
    is_key = bool(re.fullmatch(PATTERN, text)) and value_of(end) == zlib.crc32(start.encode())
    assert (key is not None) == is_key
    if key is not None:
        assert (key.text, key.id) == (text, text[8:20])


def value_of(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * len(ALPHABET) + ALPHABET.index(digit)
    return value


@given(
    st.integers(0, len(KEY.text) - 1), st.sampled_from(ALPHABET + "_"), st.sampled_from(ALPHABET)
)
def test_checksum_finds_every_typo(place: int, wrong: str, other: str) -> None:
    for changed in (
        KEY.text[:place] + wrong + KEY.text[place + 1 :],
        KEY.text[:place] + KEY.text[place + 1 :],
        KEY.text[:place] + other + KEY.text[place:],
    ):
        assert changed == KEY.text or parse_key(changed) is None


def test_new_keys_are_all_different_and_long_enough() -> None:
    keys = {new_key().text for _ in range(1000)}
    assert len(keys) == 1000
    assert len(ALPHABET) ** SECRET_LENGTH >= 2**256
    assert all(parse_key(key) for key in keys)
    assert len(checksum("")) == CHECKSUM_LENGTH


@given(st.text(max_size=20), st.integers(0, len(KEY.text)), st.text(max_size=20))
def test_no_part_of_a_secret_is_left_in_a_text(before: str, cut: int, after: str) -> None:
    shown = without_keys(f"{before}{KEY.text[:cut]} {after}")
    assert KEY.text[21:30] not in shown
    if cut < 21:
        assert shown == f"{before}{KEY.text[:cut]} {after}"


def test_key_is_not_in_its_representation() -> None:
    assert KEY.text not in repr(KEY)
    assert KEY.id in repr(KEY)


DOCUMENTS = st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode))


@given(DOCUMENTS)
@example(b"0\x80")
@example(b'{"keys": [{"id": 1}, {"')
@example(b'{"plans": {"a": {"weight": "')
def test_no_document_fails_otherwise(data: bytes) -> None:
    with suppress(ConfigurationError):
        Directory(decode_document(data, "x"))
