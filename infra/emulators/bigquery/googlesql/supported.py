"""Which GoogleSQL expressions are known to give BigQuery's answer on DuckDB.

A function enters this list only with a line in tests/infra/bigquery/test_googlesql.py that states
its result. Everything else is refused: a wrong number in a report costs more than an error.
"""

from sqlglot import exp

from infra.emulators.bigquery.errors import InvalidQueryError
from infra.emulators.bigquery.googlesql.calls import unsupported
from infra.emulators.bigquery.googlesql.rewrite import REWRITES

# What sqlglot writes for DuckDB as it stands.
_AS_IS: frozenset[type[exp.Expr]] = frozenset(
    {
        *(exp.And, exp.Or, exp.Case, exp.If, exp.Coalesce, exp.Nullif, exp.Exists),
        *(
            exp.Count,
            exp.Sum,
            exp.Avg,
            exp.Min,
            exp.Max,
            exp.AnyValue,
            exp.LogicalAnd,
            exp.LogicalOr,
        ),
        *(
            exp.ApproxDistinct,
            exp.Stddev,
            exp.StddevPop,
            exp.StddevSamp,
            exp.Variance,
            exp.VariancePop,
            exp.Corr,
        ),
        *(exp.RowNumber, exp.Rank, exp.DenseRank, exp.PercentRank, exp.CumeDist, exp.Ntile),
        *(
            exp.Lag,
            exp.Lead,
            exp.FirstValue,
            exp.LastValue,
            exp.NthValue,
            exp.PercentileCont,
            exp.PercentileDisc,
        ),
        *(
            exp.Trunc,
            exp.Ceil,
            exp.Floor,
            exp.Sign,
            exp.Abs,
            exp.Sqrt,
            exp.Pow,
            exp.Exp,
            exp.Ln,
            exp.Log,
            exp.Greatest,
            exp.Least,
            exp.Rand,
        ),
        *(
            exp.Upper,
            exp.Lower,
            exp.Trim,
            exp.Length,
            exp.StartsWith,
            exp.EndsWith,
            exp.StrPosition,
            exp.Concat,
        ),
        *(exp.Replace, exp.Repeat, exp.Reverse, exp.Left, exp.Right, exp.Split, exp.Uuid),
        *(exp.RegexpLike, exp.RegexpExtract, exp.RegexpReplace, exp.RegexpExtractAll),
        *(exp.Array, exp.ArraySize, exp.ArrayConcat, exp.ArrayReverse, exp.ArrayToString),
        *(
            exp.GenerateSeries,
            exp.WeekStart,
            exp.DateFromParts,
            exp.TimestampFromParts,
            exp.TsOrDsToDate,
            exp.CurrentTimestamp,
            exp.LastDay,
        ),
        *(
            exp.MD5,
            exp.MD5Digest,
            exp.SHA1Digest,
            exp.SHA2Digest,
            exp.Unhex,
            exp.LowerHex,
            exp.ToBase64,
            exp.FromBase64,
        ),
        *(exp.JSONExtractScalar, exp.ParseJSON, exp.TsOrDsToTimestamp),
    }
)
SUPPORTED: frozenset[type[exp.Expr]] = _AS_IS | REWRITES.keys()
_REFUSED: dict[type[exp.Expr], str] = {
    exp.Pivot: "PIVOT and UNPIVOT",
    exp.TableSample: "TABLESAMPLE",
    exp.Version: "FOR SYSTEM_TIME AS OF",
    exp.MatchRecognize: "MATCH_RECOGNIZE",
    exp.Lateral: "LATERAL",
    exp.NetFunc: "NET functions",
    exp.Collate: "COLLATE",
}
# Words that GoogleSQL takes for a name only in backquotes; sqlglot is kinder. Source:
# https://docs.cloud.google.com/bigquery/docs/reference/standard-sql/lexical#reserved_keywords
_RESERVED_WORDS = (
    "ALL AND ANY ARRAY AS ASC ASSERT_ROWS_MODIFIED AT BETWEEN BY CASE CAST COLLATE CONTAINS CREATE"
    " CROSS CUBE CURRENT DEFINE DESC DISTINCT ELSE END ENUM ESCAPE EXCEPT EXCLUDE EXISTS EXTRACT"
    " FALSE FETCH FOLLOWING FOR FROM FULL GROUP GROUPING GROUPS HASH HAVING IF IGNORE IN INNER"
    " INTERSECT INTERVAL INTO IS JOIN LATERAL LEFT LIKE LIMIT LOOKUP MERGE NATURAL NEW NO NOT NULL"
    " NULLS OF ON OR ORDER OUTER OVER PARTITION PRECEDING PROTO QUALIFY RANGE RECURSIVE RESPECT"
    " RIGHT ROLLUP ROWS SELECT SET SOME STRUCT TABLESAMPLE THEN TO TREAT TRUE UNBOUNDED UNION"
    " UNNEST USING WHEN WHERE WINDOW WITH WITHIN"
)
_RESERVED = frozenset(_RESERVED_WORDS.split())


def check(tree: exp.Expr) -> None:
    """Refuses a statement with an expression that isn't known to give BigQuery's answer.

    Args:
        tree: the statement as parsed from GoogleSQL, before any rewriting.

    Raises:
        InvalidQueryError: for a function that BigQuery does not know either.
        UnsupportedError: for one that this server can't answer.
    """
    for node in tree.walk():
        kind = type(node)
        if isinstance(node, exp.Identifier):
            _check_name(node)
        if kind in _REFUSED:
            raise unsupported(_REFUSED[kind])
        if isinstance(node, exp.Anonymous):
            if node.name.upper() != "ERROR":
                raise InvalidQueryError(f"Function not found: {node.name}")
        elif isinstance(node, exp.Func) and kind not in SUPPORTED:
            raise unsupported(f"Function {node.sql_name()}")


def _check_name(node: exp.Identifier) -> None:
    parent = node.parent
    is_first = (
        not parent.args.get("table") and not parent.args.get("db") if parent is not None else False
    )
    is_name = isinstance(parent, exp.Column | exp.Table | exp.Alias | exp.TableAlias)
    if is_name and is_first and not node.args.get("quoted") and node.name.upper() in _RESERVED:
        raise InvalidQueryError(f"Syntax error: Unexpected keyword {node.name.upper()}")
