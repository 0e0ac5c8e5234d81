"""The table of scalar functions."""

from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.translation.functions.arrays import ARRAYS
from infra.emulators.bigquery.googlesql.translation.functions.dates import DATES
from infra.emulators.bigquery.googlesql.translation.functions.json import JSON
from infra.emulators.bigquery.googlesql.translation.functions.numbers import NUMBERS
from infra.emulators.bigquery.googlesql.translation.functions.operators import OPERATORS
from infra.emulators.bigquery.googlesql.translation.functions.registry import Call, Functions, fill
from infra.emulators.bigquery.googlesql.translation.functions.strings import STRINGS

FUNCTIONS: Functions = {**OPERATORS, **NUMBERS, **STRINGS, **DATES, **ARRAYS, **JSON}


def function(call: Call) -> str:
    """Returns DuckDB's SQL for a call.

    Raises:
        UnsupportedError: for a function, or types of arguments, without a translation.
    """
    found = FUNCTIONS.get(call.name)
    if found is None:
        raise unsupported(f"Function {call.name.strip('$').upper()}")
    return fill(found, call)
