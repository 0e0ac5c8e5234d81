"""ZetaSQL options for BigQuery's dialect.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/query-syntax
"""

from zetasql.wasi._pb2.zetasql.proto.options_pb2 import LanguageOptionsProto
from zetasql.wasi._pb2.zetasql.public import options_pb2 as options
from zetasql.wasi._pb2.zetasql.resolved_ast import resolved_node_kind_pb2 as kinds

_QUERIES = (
    "ALLOW_CONSECUTIVE_ON",
    "ALLOW_DASHES_IN_TABLE_NAME",
    "ANALYTIC_FUNCTIONS",
    "BARE_ARRAY_ACCESS",
    "BY_NAME",
    "CORRESPONDING",
    "DISALLOW_PIVOT_AND_UNPIVOT_ON_ARRAY_SCANS",
    "FOR_SYSTEM_TIME_AS_OF",
    "GROUPING_BUILTIN",
    "GROUPING_SETS",
    "GROUP_BY_ALL",
    "GROUP_BY_ARRAY",
    "GROUP_BY_ROLLUP",
    "GROUP_BY_STRUCT",
    "IS_DISTINCT",
    "LIKE_ANY_SOME_ALL",
    "NULLS_FIRST_LAST_IN_ORDER_BY",
    "PIPES",
    "PIVOT",
    "QUALIFY",
    "SELECT_STAR_EXCEPT_REPLACE",
    "TABLESAMPLE",
    "TABLE_VALUED_FUNCTIONS",
    "UNPIVOT",
    "WITH_ON_SUBQUERY",
    "WITH_RECURSIVE",
)
_TYPES = (
    "BIGNUMERIC_TYPE",
    "CIVIL_TIME",
    "DECIMAL_ALIAS",
    "GEOGRAPHY",
    "INTERVAL_TYPE",
    "JSON_TYPE",
    "NUMERIC_TYPE",
    "PARAMETERIZED_TYPES",
    "RANGE_TYPE",
)
_FUNCTIONS = (
    "ADDITIONAL_STRING_FUNCTIONS",
    "ALLOW_REGEXP_EXTRACT_OPTIONALS",
    "ARRAY_FIND_FUNCTIONS",
    "CAST_DIFFERENT_ARRAY_TYPES",
    "CBRT_FUNCTIONS",
    "CONCAT_MIXED_TYPES",
    "DATE_ARITHMETICS",
    "DATE_TIME_CONSTRUCTORS",
    "EXTENDED_DATE_TIME_SIGNATURES",
    "FORMAT_IN_CAST",
    "HAVING_IN_AGGREGATE",
    "JSON_ARRAY_FUNCTIONS",
    "JSON_ARRAY_VALUE_EXTRACTION_FUNCTIONS",
    "JSON_CONSTRUCTOR_FUNCTIONS",
    "JSON_KEYS_FUNCTION",
    "JSON_LAX_VALUE_EXTRACTION_FUNCTIONS",
    "JSON_MORE_VALUE_EXTRACTION_FUNCTIONS",
    "JSON_MUTATOR_FUNCTIONS",
    "JSON_VALUE_EXTRACTION_FUNCTIONS",
    "LIMIT_IN_AGGREGATE",
    "NAMED_ARGUMENTS",
    "NULL_HANDLING_MODIFIER_IN_AGGREGATE",
    "NULL_HANDLING_MODIFIER_IN_ANALYTIC",
    "ORDER_BY_IN_AGGREGATE",
    "ROUND_WITH_ROUNDING_MODE",
    "SAFE_FUNCTION_CALL",
    "TIME_BUCKET_FUNCTIONS",
    "WEEK_WITH_WEEKDAY",
)
_MANIPULATIONS = (
    "DML_UPDATE_WITH_JOIN",
    "OMIT_INSERT_COLUMN_LIST",
)
_STATEMENTS = ("QUERY", "INSERT", "UPDATE", "DELETE", "MERGE")
"""Lists only what the analyzer reads, because it copies the options ten times a statement."""
_REWRITES = (
    "ARRAY_FILTER_TRANSFORM",
    "ARRAY_INCLUDES",
    "BUILTIN_FUNCTION_INLINER",
    "FLATTEN",
    "GROUPING_SET",
    "LIKE_ANY_ALL",
    "PIVOT",
    "TYPEOF_FUNCTION",
    "UNPIVOT",
    "WITH_EXPR",
)
"""Rewrites that the analyzer applies to produce simpler nodes."""


def language() -> LanguageOptionsProto:
    """Returns the options for BigQuery's dialect."""
    language_options = LanguageOptionsProto(
        name_resolution_mode=options.NAME_RESOLUTION_DEFAULT,
        product_mode=options.PRODUCT_EXTERNAL,
        supported_statement_kinds=[
            kinds.ResolvedNodeKind.Value(f"RESOLVED_{name}_STMT") for name in _STATEMENTS
        ],
        reserved_keywords=["QUALIFY"],
    )
    for name in (*_QUERIES, *_TYPES, *_FUNCTIONS, *_MANIPULATIONS):
        language_options.enabled_language_features.append(
            options.LanguageFeature.Value(f"FEATURE_{name}")
        )
    return language_options


def rewrites() -> list[int]:
    """Returns the rewrites that the analyzer applies."""
    return [options.ResolvedASTRewrite.Value(f"REWRITE_{name}") for name in _REWRITES]
