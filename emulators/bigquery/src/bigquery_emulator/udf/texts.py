"""Normalizes text for comparison by CONTAINS_SUBSTR."""

import unicodedata


def folded(text: str) -> str:
    """Returns a form that is the same for strings that differ only in case or diacritics.

    Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/string_functions#contains_substr
    """
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
