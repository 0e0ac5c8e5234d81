"""Mathematical functions."""

from __future__ import annotations

from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.googlesql.translation.functions.registry import (
    Call,
    Functions,
    Translate,
    fill,
    tried,
)

_ROUNDING_MODES = {1: "ROUND_HALF_AWAY_FROM_ZERO", 2: "ROUND_HALF_EVEN"}
"""The values of `zetasql.functions.RoundingMode`."""
_INT, _DOUBLE, _NUMERIC = types.TYPE_INT64, types.TYPE_DOUBLE, types.TYPE_NUMERIC


def _by_type(**forms: Translate | str) -> Translate:
    """Returns a translation with one form for each type of the first argument: `int` and so on."""
    kinds = {"int": _INT, "double": _DOUBLE, "numeric": _NUMERIC}
    by_kind = {kinds[name]: form for name, form in forms.items()}

    def write(call: Call) -> str:
        form = by_kind.get(call.kind())
        if form is None:
            raise call.refused()
        return fill(form, call)

    return write


def _try_form(form: str) -> Translate:
    """Returns a form that yields NULL on failure."""
    return lambda call: tried(call.nodes, call.sql, lambda sql: form.format(*sql))


def _rounded(name: str) -> Translate:
    def write(call: Call) -> str:
        value, *digits = call.sql[:2]
        if len(call.sql) > 2:
            mode = _ROUNDING_MODES.get(call.nodes[2].value.value.enum_value)
            if call.kind() != _NUMERIC or mode is None:
                raise call.refused()
            return f"bq_round_numeric({value}, {digits[0]}, '{mode}')"
        if call.kind() == _NUMERIC and (not digits or call.integer(1) is not None):
            digit_words = [] if not digits else [str(call.integer(1))]
            return f"CAST({name}({', '.join([value, *(digit_words or ['0'])])}) AS DECIMAL(38,9))"
        if call.kind() == _NUMERIC and name == "round":
            return f"bq_round_numeric({value}, {digits[0]}, 'ROUND_HALF_AWAY_FROM_ZERO')"
        if call.kind() == _DOUBLE:
            return _with_digits(name, call) if digits else f"{name}({value})"
        raise call.refused()

    return write


def _with_digits(name: str, call: Call) -> str:
    value, digits = call.sql
    is_computed = call.nodes[0].kind == "FunctionCall" and not call.is_constant
    if not is_computed or call.integer(1) is None:
        return f"bq.{name}_digits({value}, {digits})"
    # The macro expands its argument about thirty times, and DuckDB plans every copy, including
    # expansions inside the argument itself. A lambda evaluates it once, at a cost of 0.1 us per
    # row.
    rounded = f"lambda computed: bq.{name}_digits(computed, {digits})"
    return f"list_extract(list_transform([{value}], {rounded}), 1)"


def _log(call: Call) -> str:
    if call.kind() != _DOUBLE:
        raise call.refused()
    return call.put("bq.ln({0})") if len(call.sql) == 1 else call.put("bq.log({0}, {1})")


def _safe(operator: str) -> Translate:
    """Returns an operator that yields NULL if its result is out of range."""
    plain = _try_form(f"{{0}} {operator} {{1}}")
    of_float = (
        f"(CASE WHEN isinf({{0}} {operator} {{1}}) AND NOT isinf({{0}}) AND NOT isinf({{1}})"
        f" THEN NULL ELSE {{0}} {operator} {{1}} END)"
    )
    # In DuckDB, the sum and difference of two DECIMAL(38,9) values have the same type, and overflow
    # is an error.
    numeric = "bq.safe_numeric_multiply({0}, {1})" if operator == "*" else plain
    return _by_type(int=plain, double=of_float, numeric=numeric)


def _range_bucket(call: Call) -> str:
    if call.kind() == _DOUBLE:
        raise call.refused()  # because of NaN
    return call.put("bq.range_bucket({0}, {1})")


NUMBERS: Functions = {
    "abs": _by_type(int="bq.int_abs({0})", double="abs({0})", numeric="abs({0})"),
    "sign": _by_type(
        int="CAST(sign({0}) AS BIGINT)",
        double="bq.float_sign({0})",
        numeric="CAST(sign({0}) AS DECIMAL(38,9))",
    ),
    "div": _by_type(int="bq.div({0}, {1})"),
    "mod": _by_type(int="bq.mod({0}, {1})", numeric="bq.numeric_mod({0}, {1})"),
    "safe_divide": _by_type(
        double="bq.safe_divide({0}, {1})", numeric=_try_form("bq.numeric_divide({0}, {1})")
    ),
    "safe_add": _safe("+"),
    "safe_subtract": _safe("-"),
    "safe_multiply": _safe("*"),
    "safe_negate": _by_type(
        int=_try_form("CAST(0 AS BIGINT) - {0}"), double="(-({0}))", numeric="(-({0}))"
    ),
    "round": _rounded("round"),
    "trunc": _rounded("trunc"),
    "ceil": _by_type(double="ceil({0})", numeric="CAST(ceil({0}) AS DECIMAL(38,9))"),
    "floor": _by_type(double="floor({0})", numeric="CAST(floor({0}) AS DECIMAL(38,9))"),
    "sqrt": _by_type(double="bq.sqrt({0})"),
    "pow": _by_type(double="bq.pow({0}, {1})"),
    "exp": _by_type(double="bq.finite_of(exp({0}), {0}, 'EXP')"),
    "ln": _log,
    "log": _log,
    "log10": _by_type(double="bq.log({0}, 10e0)"),
    "is_nan": "isnan({0})",
    "is_inf": "isinf({0})",
    "rand": lambda call: "random()",
    "cbrt": _by_type(double="cbrt({0})"),
    "asin": _by_type(double="bq.arc({0}, 'ASIN')"),
    "acos": _by_type(double="bq.arc({0}, 'ACOS')"),
    "sinh": _by_type(double="bq.in_domain(sinh({0}), {0}, 'SINH')"),
    "cosh": _by_type(double="bq.in_domain(cosh({0}), {0}, 'COSH')"),
    "tanh": _by_type(double="tanh({0})"),
    "asinh": _by_type(double="asinh({0})"),
    "atanh": _by_type(double="bq.in_domain(atanh({0}), {0}, 'ATANH')"),
    "bit_count": _by_type(int="CAST(bit_count({0}) AS BIGINT)"),
    "range_bucket": _range_bucket,
    "cos": _by_type(double="bq.circular({0}, 'COS')"),
    "sin": _by_type(double="bq.circular({0}, 'SIN')"),
    "tan": _by_type(double="bq.circular({0}, 'TAN')"),
    "atan": _by_type(double="atan({0})"),
    "atan2": _by_type(double="atan2({0}, {1})"),
    "ieee_divide": _by_type(double="bq.ieee_divide({0}, {1})"),
}
