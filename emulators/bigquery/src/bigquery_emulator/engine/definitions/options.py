"""OPTIONS in data definitions: the changes they make to API resources.

A value may be any constant expression, as in
`expiration_timestamp=TIMESTAMP_ADD(CURRENT_TIMESTAMP(), INTERVAL 12 HOUR)`. Source:
https://docs.cloud.google.com/bigquery/docs/reference/standard-sql/data-definition-language#table_option_list
"""

import math
from collections.abc import Callable, Mapping

import sqlglot
from sqlglot import exp

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.tables.schema import Json

# Runs `SELECT <expression>` and returns its only value in the API's JSON format.
Evaluate = Callable[[str], object]

_PAIRS = (exp.Tuple, exp.Struct)
_DAY_MS = 86_400_000
_SHARED = {
    "description": ("description", "CAST({} AS STRING)"),
    "friendly_name": ("friendlyName", "CAST({} AS STRING)"),
}
_TABLE = {
    **_SHARED,
    "require_partition_filter": ("requirePartitionFilter", "CAST({} AS BOOL)"),
    "expiration_timestamp": ("expirationTime", "UNIX_MILLIS({})"),
}
_DATASET = {
    **_SHARED,
    "location": ("location", "CAST({} AS STRING)"),
    "default_table_expiration_days": ("defaultTableExpirationMs", "_days"),
    "default_partition_expiration_days": ("defaultPartitionExpirationMs", "_days"),
}


def table_options(texts: Mapping[str, str], evaluate: Evaluate) -> Json:
    """Returns the changes that OPTIONS make to a Table resource, as a merge patch.

    Raises:
        InvalidQueryError: an option's expression has no value, or is not a number of days.
        UnsupportedError: this server does not support an option.
    """
    others = dict(texts)
    days = others.pop("partition_expiration_days", None)
    settings = _changes(others, _TABLE, evaluate)
    if days is not None:
        settings["timePartitioning"] = {"expirationMs": _milliseconds(days, evaluate)}
    return settings


def dataset_options(texts: Mapping[str, str], evaluate: Evaluate) -> Json:
    """Returns the changes that OPTIONS make to a Dataset resource; see `table_options`."""
    return _changes(texts, _DATASET, evaluate)


def _changes(
    texts: Mapping[str, str], known: Mapping[str, tuple[str, str]], evaluate: Evaluate
) -> Json:
    changes: Json = {}
    for name, text in texts.items():
        if name == "labels":
            changes["labels"] = _labels(text)
            continue
        if name not in known:
            raise unsupported(f"OPTIONS({name})")
        field, form = known[name]
        if text.upper() == "NULL":
            changes[field] = None
        elif form == "_days":
            changes[field] = _milliseconds(text, evaluate)
        else:
            value = evaluate(form.format(text))
            changes[field] = value == "true" if form.endswith("BOOL)") else value
    return changes


def _milliseconds(text: str, evaluate: Evaluate) -> str | None:
    if text.upper() == "NULL":
        return None
    days = float(str(evaluate(f"CAST({text} AS FLOAT64)")))
    if not math.isfinite(days * _DAY_MS):
        raise InvalidQueryError(f"Invalid number of days: {text}")
    return str(int(days * _DAY_MS))


def _labels(text: str) -> Json | None:
    tree = sqlglot.parse_one(text, dialect="bigquery")
    if isinstance(tree, exp.Null):
        return None
    pairs = [part.expressions for part in tree.expressions if isinstance(part, _PAIRS)]
    flat = [part for pair in pairs for part in pair]
    if (
        not isinstance(tree, exp.Array)
        or len(pairs) != len(tree.expressions)
        or any(len(pair) != 2 for pair in pairs)
        or not all(isinstance(part, exp.Literal) and part.is_string for part in flat)
    ):
        raise unsupported("OPTIONS(labels) other than pairs of literals, as in [('a', 'b')]")
    return {key.name: value.name for key, value in pairs}
