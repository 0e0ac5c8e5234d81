"""Random GoogleSQL expressions and queries generated from seeds."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_VALUES = {
    "int": ["0", "1", "-1", "7", "42", "-3", "9223372036854775807", "CAST(NULL AS INT64)"],
    "float": ["0.0", "1.5", "-2.25", "1e10", "CAST('NaN' AS FLOAT64)", "CAST(NULL AS FLOAT64)"],
    "text": ["'abc'", "''", "'Ab c'", "'été'", "'a,b,c'", "'12'", "' x '", "CAST(NULL AS STRING)"],
    "bool": ["TRUE", "FALSE", "CAST(NULL AS BOOL)"],
    "date": ["DATE '2024-02-29'", "DATE '2023-12-31'", "CAST(NULL AS DATE)"],
    "at": [
        "TIMESTAMP '2024-03-10 07:30:00.25+00'",
        "TIMESTAMP '1969-12-31 23:59:59.999999+00'",
        "CAST(NULL AS TIMESTAMP)",
    ],
    "numeric": ["NUMERIC '1.5'", "NUMERIC '-0.000000001'", "NUMERIC '123456.789'"],
    "ints": ["[1, 2, 3]", "CAST([] AS ARRAY<INT64>)", "CAST(NULL AS ARRAY<INT64>)"],
    "texts": ["['x', 'y']", "['b']", "CAST([] AS ARRAY<STRING>)"],
}
_FORMS = {
    "int": """({int} + {int})|({int} - {int})|({int} * {int})|DIV({int}, {int})|MOD({int}, {int})
ABS({int})|LENGTH({text})|STRPOS({text}, {text})|CAST({float} AS INT64)|CAST({bool} AS INT64)
IF({bool}, {int}, {int})|COALESCE({int}, {int})|ARRAY_LENGTH({ints})|{ints}[SAFE_OFFSET({int})]
EXTRACT(DAYOFWEEK FROM {date})|EXTRACT(ISOWEEK FROM {date})|EXTRACT(HOUR FROM {at})
EXTRACT(WEEK FROM {at})|DATE_DIFF({date}, {date}, WEEK)|DATE_DIFF({date}, {date}, MONTH)
TIMESTAMP_DIFF({at}, {at}, HOUR)|UNIX_MILLIS({at})|GREATEST({int}, {int})|LEAST({int}, {int})
({int} & {int})|({int} ^ {int})|(~{int})|SIGN({int})|SAFE_CAST({text} AS INT64)|NULLIF({int}, {int})
CASE {int} WHEN {int} THEN {int} ELSE {int} END|CAST({numeric} AS INT64)|BYTE_LENGTH({text})
UNICODE({text})|BIT_COUNT({int})|INSTR({text}, 'a', 1, 1)|RANGE_BUCKET({int}, [0, 5, 50])
DATE_DIFF({date}, {date}, QUARTER)|SAFE_ADD({int}, {int})|SAFE_MULTIPLY({int}, {int})""",
    "float": """({float} + {float})|({float} * {float})|({int} / {int})
SAFE_DIVIDE({float}, {float})|ROUND({float}, 1)|ROUND({float})|TRUNC({float})
FLOOR({float})|CEIL({float})|ABS({float})
CAST({int} AS FLOAT64)|IF({bool}, {float}, {int})|GREATEST({float}, {float})|SQRT({float})
LEAST({float}, {float})|COALESCE({float}, {int})|POW({float}, 2)|CAST({numeric} AS FLOAT64)""",
    "text": """UPPER({text})|LOWER({text})|CONCAT({text}, {text})|TRIM({text})
SUBSTR({text}, {int}, 2)|SUBSTR({text}, 2)|REPLACE({text}, {text}, {text})|CAST({int} AS STRING)
CAST({float} AS STRING)|CAST({bool} AS STRING)|CAST({date} AS STRING)|CAST({at} AS STRING)
CAST({numeric} AS STRING)|FORMAT_DATE('%Y/%m/%d', {date})|IF({bool}, {text}, {text})
FORMAT_TIMESTAMP('%F %T', {at}, 'Europe/Berlin')|COALESCE({text}, {text})|REVERSE({text})
LEFT({text}, 2)|RIGHT({text}, 2)|LPAD({text}, 4, '*')|ARRAY_TO_STRING({texts}, '-')
REGEXP_REPLACE({text}, r'[a-c]', 'z')|REGEXP_EXTRACT({text}, r'[a-z]+')
FORMAT('%d-%s', {int}, {text})|STRING({at}, 'Asia/Tokyo')|SPLIT({text}, ',')[SAFE_OFFSET(1)]
TO_HEX(MD5({text}))|INITCAP({text})|SOUNDEX({text})|TRANSLATE({text}, 'ab', 'x')
TO_JSON_STRING({text})|TO_JSON_STRING({int})|TO_JSON_STRING({at})|FORMAT_DATE('%a %e %b %j', {date})
JSON_VALUE(CONCAT('{"a":', TO_JSON_STRING({text}), '}'), '$.a')
CODE_POINTS_TO_STRING(TO_CODE_POINTS({text}))""",
    "bool": """({int} < {int})|({float} >= {float})|({text} = {text})|({date} != {date})
({at} <= {at})|({bool} AND {bool})|({bool} OR {bool})|(NOT {bool})|({int} IS NULL)
({int} IN ({int}, {int}))
({float} BETWEEN {float} AND {float})|({text} LIKE 'a%')|STARTS_WITH({text}, {text})
REGEXP_CONTAINS({text}, r'^a')|({int} IN UNNEST({ints}))|({float} = {float})|({numeric} < {numeric})
({int} = {float})|({numeric} > {int})|({float} IS DISTINCT FROM {float})|({float} != {float})
({float} IN ({float}, {float}))|EXISTS(SELECT 1 FROM UNNEST({ints}) AS x WHERE x > {int})""",
    "date": """DATE_ADD({date}, INTERVAL 1 MONTH)|DATE_SUB({date}, INTERVAL 3 DAY)|LAST_DAY({date})
DATE_TRUNC({date}, WEEK)|DATE_TRUNC({date}, ISOYEAR)|DATE_TRUNC({date}, QUARTER)|DATE({at})
DATE({at}, 'America/New_York')|IF({bool}, {date}, {date})|({date} + 1)|SAFE_CAST({text} AS DATE)""",
    "at": """TIMESTAMP_ADD({at}, INTERVAL 90 MINUTE)|TIMESTAMP_SUB({at}, INTERVAL 1 DAY)
TIMESTAMP_TRUNC({at}, HOUR)|TIMESTAMP_TRUNC({at}, DAY, 'America/New_York')|TIMESTAMP({date})
TIMESTAMP_TRUNC({at}, WEEK(MONDAY))|TIMESTAMP({date}, 'Asia/Kolkata')|COALESCE({at}, {at})""",
    "numeric": """({numeric} + {numeric})|({numeric} * {numeric})|({numeric} - {int})|ABS({numeric})
ROUND({numeric}, 2)|CAST({int} AS NUMERIC)|({numeric} / 4)|TRUNC({numeric}, 3)|FLOOR({numeric})
SAFE_MULTIPLY({numeric}, {numeric})|SAFE_SUBTRACT({numeric}, {numeric})""",
    "ints": """ARRAY_REVERSE({ints})|ARRAY_CONCAT({ints}, {ints})|GENERATE_ARRAY(1, 4)
TO_CODE_POINTS({text})|ARRAY(SELECT DISTINCT x FROM UNNEST({ints}) AS x ORDER BY x)
ARRAY(SELECT x + 1 FROM UNNEST({ints}) AS x ORDER BY x)""",
    "texts": "SPLIT({text}, 'b')|ARRAY_REVERSE({texts})|ARRAY_CONCAT({texts}, {texts})",
}
_BY_TYPE = {name: re.split(r"[|\n]", forms) for name, forms in _FORMS.items()}
_NONE: Mapping[str, Sequence[str]] = {}
_WANTED = ("int", "float", "text", "bool", "date", "at", "numeric", "ints")


def random_query(seed: int) -> str:
    """Returns a query with one expression, with calls nested up to three deep."""
    chance = random.Random(seed)
    return f"SELECT {_expression(chance, chance.choice(_WANTED), chance.choice((1, 2, 2, 3)))}"


_TABLES = {
    "people": {
        "int": ["id", "address.zip", "ARRAY_LENGTH(tags)"],
        "float": ["score"],
        "text": ["name", "team", "address.city"],
        "date": ["born"],
        "at": ["seen"],
        "texts": ["tags"],
    },
    "orders": {"int": ["person"], "text": ["item"], "numeric": ["paid"]},
}
_SHAPES = (
    "SELECT {key}, {total} AS n FROM {table} WHERE {bool} GROUP BY 1 HAVING {total} > 0",
    "SELECT {key}, COUNT(*) AS n, {total} FROM {table} GROUP BY {key} HAVING COUNT(*) < 3",
    "SELECT id, {window} OVER (PARTITION BY {key} ORDER BY {order}, id) FROM people WHERE {bool}",
    "SELECT id, {total} OVER (PARTITION BY {key}) AS n FROM people",
    "SELECT id, item, {any} AS found FROM people {join} JOIN orders ON id = person",
    "SELECT id, COUNT(item), MIN(paid) FROM people {join} JOIN orders ON id = person GROUP BY id",
    "SELECT DISTINCT {any} FROM {table} WHERE {bool}",
    "SELECT id, tag FROM people, UNNEST(tags) AS tag WHERE {bool}",
    "SELECT id, ARRAY(SELECT {element} FROM UNNEST(tags) AS tag ORDER BY tag) FROM people",
    "SELECT {any} FROM {table} WHERE {int} IN (SELECT person FROM orders) OR {bool}",
    "SELECT {int} FROM people UNION ALL SELECT {int} FROM people WHERE {bool}",
    "SELECT ARRAY_AGG({text} IGNORE NULLS ORDER BY id) FROM people WHERE {bool}",
)
_TOTALS = (
    *("COUNT({text})", "COUNT(DISTINCT {text})", "COUNTIF({bool})", "MIN({int})", "MAX({int})"),
    *("MAX(LENGTH({text}))", "COUNT(DISTINCT {date})", "COUNT({at})"),
)
_WINDOWS = (
    *("ROW_NUMBER()", "RANK()", "DENSE_RANK()", "NTILE(2)", "LAG({int})", "LEAD({text}, 2)"),
    *("FIRST_VALUE({int})", "COUNT({text})", "MAX({int})", "MIN({text})"),
)


def random_table_query(seed: int) -> str:
    """Returns a query on tables: groups, HAVING, windows, joins, arrays, DISTINCT, UNION ALL."""
    chance = random.Random(seed)
    shape = chance.choice(_SHAPES)
    table = chance.choice(list(_TABLES)) if "{table}" in shape else "people"
    columns = _TABLES[table]

    def fill(form: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: put(name[1]), form)

    def put(name: str) -> str:
        if name in chosen:
            return chosen[name]
        return _expression(chance, name, chance.choice((0, 1, 2)), columns)

    kinds = [kind for kind in columns if kind != "texts"]
    chosen = {
        "table": table,
        "key": chance.choice(columns["text"]),
        "join": chance.choice(("INNER", "LEFT", "FULL", "RIGHT")),
        "order": chance.choice(columns["int"] + columns["text"]) + chance.choice(("", " DESC")),
        "element": chance.choice(("tag", "UPPER(tag)", "LENGTH(tag)", "CONCAT(tag, '!')")),
    }
    chosen["any"] = put(chance.choice(kinds))
    chosen["total"] = fill(chance.choice(_TOTALS))
    chosen["window"] = fill(chance.choice(_WINDOWS))
    return fill(shape)


def _expression(
    chance: random.Random, kind: str, depth: int, columns: Mapping[str, Sequence[str]] = _NONE
) -> str:
    if depth == 0 or chance.random() < 0.15:
        # Prefers columns over constants, if there are any columns.
        return chance.choice([*_VALUES[kind], *tuple(columns.get(kind, ())) * 6])
    form = chance.choice(_BY_TYPE[kind])
    return re.sub(r"\{(\w+)\}", lambda name: _expression(chance, name[1], depth - 1, columns), form)
