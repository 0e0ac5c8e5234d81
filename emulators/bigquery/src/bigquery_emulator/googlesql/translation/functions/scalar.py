"""The table of scalar functions."""

from bigquery_emulator.googlesql.calls import unsupported
from bigquery_emulator.googlesql.translation.functions.arrays import ARRAYS
from bigquery_emulator.googlesql.translation.functions.dates import DATES
from bigquery_emulator.googlesql.translation.functions.json import JSON
from bigquery_emulator.googlesql.translation.functions.numbers import NUMBERS
from bigquery_emulator.googlesql.translation.functions.operators import OPERATORS
from bigquery_emulator.googlesql.translation.functions.registry import Call, Functions, fill
from bigquery_emulator.googlesql.translation.functions.strings import STRINGS

FUNCTIONS: Functions = {**OPERATORS, **NUMBERS, **STRINGS, **DATES, **ARRAYS, **JSON}


def function(call: Call) -> str:
    """Returns the DuckDB SQL for a call.

    Raises:
        UnsupportedError: a function or its argument types have no translation.
    """
    translation = FUNCTIONS.get(call.name)
    if translation is None:
        raise unsupported(f"Function {call.name.strip('$').upper()}")
    return fill(translation, call)
