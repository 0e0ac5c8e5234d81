"""An embedded BigQuery: the REST API v2 over DuckDB, for one machine and for tests.

Google's Python client and the `bq` tool talk to it as to the service. `python -m infra.local.bigquery` runs it alone.
"""

from infra.local.bigquery.server import BigQueryServer, serve

__all__ = ["BigQueryServer", "serve"]
