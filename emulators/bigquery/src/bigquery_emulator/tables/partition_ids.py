"""Partition decorators: `table$20260131` names one of the table's partitions.

Source: https://docs.cloud.google.com/bigquery/docs/partitioned-tables#partition_decorators
"""

import re
from datetime import datetime

from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.tables.resources import Partitioning, TableKey, TableResource
from bigquery_emulator.tables.schema import quoted

_FORMATS = {"YEAR": "%Y", "MONTH": "%Y%m", "DAY": "%Y%m%d", "HOUR": "%Y%m%d%H"}
_DIGITS = {"YEAR": 4, "MONTH": 6, "DAY": 8, "HOUR": 10}
_NULL = "__NULL__"


def undecorated(key: TableKey) -> tuple[TableKey, str | None]:
    """Splits a table name into the name without its decorator and the decorator's partition."""
    table_id, mark, partition_id = key.table_id.partition("$")
    if not mark:
        return key, None
    return TableKey(key.project, key.dataset_id, table_id), partition_id


def partition_unit(partition_id: str) -> str:
    """Returns the time unit that a partition's name implies.

    Raises:
        InvalidError: the name is not a time.
    """
    for unit, digits in _DIGITS.items():
        if len(partition_id) == digits and partition_id.isdecimal():
            return unit
    raise InvalidError(f"Invalid partition decorator: ${partition_id}")


def partition_condition(table: TableResource, partition_id: str) -> str:
    """Returns the DuckDB condition that selects a partition's rows.

    Raises:
        InvalidError: the table is not partitioned, or its partitions have a different kind of name.
    """
    partitioning = _partitioning(table)
    column = quoted(partitioning.column)
    if partition_id == _NULL:
        return f"{column} IS NULL"
    if partitioning.unit == "RANGE":
        return _range_condition(table, column, partition_id)
    start = partition_start(table, partition_id)
    unit = partitioning.unit.lower()
    return f"date_trunc('{unit}', CAST({column} AS TIMESTAMP)) = {start}"


def partition_start(table: TableResource, partition_id: str) -> str:
    """Returns the DuckDB SQL for a time partition's start.

    Raises:
        InvalidError: the partition's name has a different unit than the table's partitions.
    """
    partitioning = _partitioning(table)
    if partition_id.startswith("__"):
        raise UnsupportedError(f"${partition_id}: not supported by the embedded BigQuery")
    unit = partitioning.unit
    if unit not in _FORMATS or len(partition_id) != _DIGITS[unit]:
        raise InvalidError(
            f"Invalid partition decorator ${partition_id}: {table.key} is partitioned by {unit}"
        )
    try:
        start = datetime.strptime(partition_id, _FORMATS[unit])
    except ValueError:
        raise InvalidError(f"Invalid partition decorator: ${partition_id}") from None
    return f"TIMESTAMP '{start:%Y-%m-%d %H:%M:%S}'"


def partition_id_sql(partitioning: Partitioning) -> str:
    """Returns the DuckDB SQL for the name of a row's partition."""
    column = quoted(partitioning.column)
    if partitioning.unit == "RANGE":
        if partitioning.interval is None:
            return f"'{_NULL}'"
        start, end, step = partitioning.start, partitioning.end, partitioning.interval
        # The distance from the start may exceed INT64.
        value = f"CAST({column} AS HUGEINT)"
        named = f"CAST({value} - ({value} - {start}) % {step} AS VARCHAR)"
        inside = f"{column} >= {start} AND {column} < {end}"
        return (
            f"CASE WHEN {column} IS NULL THEN '{_NULL}' WHEN {inside} THEN {named}"
            " ELSE '__UNPARTITIONED__' END"
        )
    text = f"strftime(CAST({column} AS TIMESTAMP), '{_FORMATS[partitioning.unit]}')"
    return f"coalesce({text}, '{_NULL}')"


def _range_condition(table: TableResource, column: str, partition_id: str) -> str:
    partitioning = _partitioning(table)
    if not re.fullmatch(r"-?\d{1,19}", partition_id) or partitioning.interval is None:
        raise InvalidError(f"Invalid partition decorator: ${partition_id}")
    start = int(partition_id)
    if (
        not partitioning.start <= start < partitioning.end
        or (start - partitioning.start) % partitioning.interval
    ):
        raise InvalidError(
            f"Invalid partition decorator: ${partition_id} is not the start of a partition"
        )
    end = min(start + partitioning.interval, partitioning.end)
    return f"{column} >= {start} AND {column} < {end}"


def _partitioning(table: TableResource) -> Partitioning:
    if table.partitioning is None:
        raise InvalidError(
            f"Table {table.key} is not partitioned, so it does not accept a partition decorator"
        )
    return table.partitioning
