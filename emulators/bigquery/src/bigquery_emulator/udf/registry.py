"""Registers the functions in a DuckDB database, for macros and translations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigquery_emulator.udf.farmhash import fingerprint64
from bigquery_emulator.udf.json_values import canonical, changed, keys, pretty, removed
from bigquery_emulator.udf.numbers import format_numeric, round_numeric
from bigquery_emulator.udf.texts import folded

_NUMERIC = "DECIMAL(38,9)"
_FUNCTIONS: dict[str, tuple[Callable[..., Any], list[str], str]] = {
    "bq_json_canonical": (canonical, ["VARCHAR"], "VARCHAR"),
    "bq_json_pretty": (pretty, ["VARCHAR"], "VARCHAR"),
    "bq_json_keys": (keys, ["VARCHAR", "BIGINT", "VARCHAR"], "VARCHAR[]"),
    "bq_json_set": (changed, ["VARCHAR", "VARCHAR", "VARCHAR", "BOOLEAN"], "VARCHAR"),
    "bq_json_remove": (removed, ["VARCHAR", "VARCHAR"], "VARCHAR"),
    "bq_farm_fingerprint": (fingerprint64, ["BLOB"], "BIGINT"),
    "bq_folded": (folded, ["VARCHAR"], "VARCHAR"),
    "bq_format_numeric": (format_numeric, ["VARCHAR", _NUMERIC], "VARCHAR"),
    "bq_round_numeric": (round_numeric, [_NUMERIC, "BIGINT", "VARCHAR"], _NUMERIC),
}
"""Functions by DuckDB name, with argument and result types. NULL in, NULL out."""


def register(connection: Any) -> None:
    """Registers the functions for all sessions of a database."""
    for name, (function, takes, gives) in _FUNCTIONS.items():
        connection.create_function(name, function, takes, gives)


def unregister(connection: Any) -> None:
    """Unregisters the functions. Otherwise, DuckDB complains when the process exits."""
    for name in _FUNCTIONS:
        connection.remove_function(name)
