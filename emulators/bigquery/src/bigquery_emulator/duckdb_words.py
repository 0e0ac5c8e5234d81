"""Translates DuckDB's error messages into GoogleSQL terms.

DuckDB's messages mention types that don't appear in the statement, such as INT128, and SQL that the
user never sees.
"""

import logging
import re

_log = logging.getLogger(__name__)
_KIND = re.compile(r"^[A-Z]\w*(?: \w+)* Error: ")
_OUT_OF_RANGE = "A value is out of range"
_FALLBACK = "A value is out of range, or of a form that the query can't work on"
_RULES = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"^Overflow in \w+ of INT64 \((.*)\)!", r"int64 overflow: \1"),
        (r"^Overflow in \w+ of DECIMAL", "numeric overflow"),
        (r"^Overflow on abs\((-?\d+)\)", r"int64 overflow: ABS(\1)"),
        (
            r'^Could not parse string "(.*)" according to format specifier',
            r'Failed to parse input string "\1"',
        ),
        (r"^Failed to cast decimal value (\S+) to type INT64", r"int64 out of range: \1"),
        (r"^Type INT128 with value (\S+) can't be cast.*INT64", r"int64 overflow: \1"),
        (r"^Type \w+ with value (.*?) can't be cast", rf"{_OUT_OF_RANGE}: \1"),
        (r"^Could not cast value (.*?) to DECIMAL", r"numeric out of range: \1"),
        (r"^Casting value \"?(.*?)\"? to type DECIMAL", r"numeric out of range: \1"),
        (r"^Could not convert string [\"'](.*?)[\"'] to DECIMAL", r"Invalid NUMERIC value: \1"),
        (r"^Failure in decode: ", "Invalid UTF-8 in the BYTES"),
        (r"^Invalid UTF8 Codepoint (-?\d+)", r"Invalid codepoint \1"),
        (
            r"^(?:Could not decode string .*base64|.*[Bb]ase64)",
            "Failed to decode invalid base64 string",
        ),
        (r"^Lists larger than", "Cannot generate arrays with so many elements"),
        (
            r"^More than one row returned by a subquery",
            "Scalar subquery produced more than one element",
        ),
        (r"^Date out of range: (.*)$", r"Input calculates to invalid date: \1"),
        (
            r"^(?:Conversion Error: )?(?:date|timestamp|time) field value out of range: (.*)$",
            r"Invalid date or time: \1",
        ),
        (r"^Malformed JSON", "Invalid JSON value"),
        (
            r"^(?:invalid )?(?:date|timestamp|time) field (?:format|value out of range): (.*?),"
            r" exp.*",
            r"Invalid date or time: \1",
        ),
        (
            r"^(?:bad repetition operator|missing [\])]|no argument for repetition|trailing \\\\"
            r"|unexpected \)|invalid (?:character class|escape|named capture|repetition)).*",
            r"Cannot parse regular expression: \g<0>",
        ),
    )
)
_OWN_WORDS = re.compile(
    r"DuckDB|\bUDF\b|Python|\bU?(?:TINY|SMALL|BIG|HUGE)INT\b|\bU?INT(?:8|16|32|128)\b"
    r"|\b(?:DECIMAL|VARCHAR|BLOB|DOUBLE)\b|TIMESTAMPTZ|TIMESTAMP_(?:M|N|U)?S\b|WITH TIME ZONE"
    r"|struct_\w+|list_\w+|\w*strptime|format specifier|explicit cast|source column|type casts"
    r"|Candidate|memory\.main|bq\.|\bbq_\w+|lambda|macro|Binder|Catalog|PRAGMA|\(Original error"
)


def is_of_the_database(text: str) -> bool:
    """Returns True if a message contains a term that is specific to this server."""
    return text == _FALLBACK or _OWN_WORDS.search(text) is not None


def message_of(error: Exception) -> str:
    """Returns a DuckDB error's text in terms that users understand, without the error kind.

    Args:
        error: any `duckdb.Error`, or a UnicodeDecodeError, which replaces an error whose message
            DuckDB cut off in the middle of a character.
    """
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "replace")
    return in_googlesql(_KIND.sub("", text.split("\n")[0]))


def in_googlesql(text: str) -> str:
    """Returns a message's first line in terms that users understand.

    Args:
        text: DuckDB's message, without the leading error kind.
    """
    for pattern, words in _RULES:
        if match := pattern.match(text):
            return match.expand(words)
    # In Python 3.11.2, there is no text if DuckDB cut the message off in the middle of a character.
    if not text or is_of_the_database(text):
        _log.warning("a database error has no translation to GoogleSQL: %s", text)
        return _FALLBACK
    return text
