"""An embedded BigQuery: the REST API v2 over DuckDB, for one machine and for tests.

Google's Python client and the `bq` tool talk to it as to the service. `python -m
infra.emulators.bigquery` runs it alone.

    bq --api http://127.0.0.1:9050 --project_id=p --oauth_access_token=none query
    --use_legacy_sql=false 'SELECT 1'

Not the service's answer: NUMERIC / NUMERIC and AVG(NUMERIC) are FLOAT64, ROUND and CEIL of an INT64
stay INT64, a dry run counts the bytes of whole tables. What else it can't answer it refuses.
"""

from infra.emulators.bigquery.server import BigQueryServer, serve

__all__ = ["BigQueryServer", "serve"]
