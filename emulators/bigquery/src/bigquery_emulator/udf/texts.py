"""Text as CONTAINS_SUBSTR compares it."""

import unicodedata


def folded(text: str) -> str:
    """Returns a text in a form that is the same for texts that differ in case, or in their marks.

    Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/string_functions#contains_substr
    """
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
