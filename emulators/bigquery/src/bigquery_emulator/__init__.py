"""An embedded BigQuery for a single machine and for tests: the REST API v2 on top of DuckDB.

Google's Python client and the `bq` tool work with it as they do with the service. Run it standalone
with `bigquery-emulator`.

    bq --api http://127.0.0.1:9050 --project_id=p --oauth_access_token=none query
    --use_legacy_sql=false 'SELECT 1'

Differences from the service: NUMERIC / NUMERIC and AVG(NUMERIC) are FLOAT64, ROUND and CEIL of an
INT64 stay INT64, and a dry run counts the bytes of entire tables. Anything else that this server
can't do exactly as the service does is rejected.

`Analyzer` checks a statement against the given tables, as the server does, but doesn't run it.
"""

from bigquery_emulator.errors import InvalidQueryError
from bigquery_emulator.googlesql.analysis.analyzer import Analyzer, NamedTable, ParameterTypes
from bigquery_emulator.googlesql.analysis.types import type_of_field, type_of_parameter
from bigquery_emulator.server import BigQueryServer, serve
from bigquery_emulator.tables.schema import parse_schema

__all__ = [
    "Analyzer",
    "BigQueryServer",
    "InvalidQueryError",
    "NamedTable",
    "ParameterTypes",
    "parse_schema",
    "serve",
    "type_of_field",
    "type_of_parameter",
]
