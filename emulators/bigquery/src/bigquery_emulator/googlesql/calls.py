"""The error for features that BigQuery has but this server lacks."""

from bigquery_emulator.errors import UnsupportedError


def unsupported(what: str) -> UnsupportedError:
    """Returns the error for a feature that BigQuery has but this server lacks."""
    return UnsupportedError(f"{what}: not supported by the embedded BigQuery", "query")
