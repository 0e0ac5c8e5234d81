"""The error for what BigQuery can do and this server can't."""

from bigquery_emulator.errors import UnsupportedError


def unsupported(what: str) -> UnsupportedError:
    """Returns the error for what BigQuery can do and this server can't."""
    return UnsupportedError(f"{what}: not supported by the embedded BigQuery", "query")
