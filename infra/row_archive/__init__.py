"""The row archive: Parquet files in the object store, created from rows that processes write there.

Writers upload compressed lines to `incoming/TABLE` (shared/usage/senders.py). `python -m
infra.row_archive` reads them, writes `archive/TABLE/day=YYYY-MM-DD/*.parquet`, and loads the same
rows into BigQuery (embedded or Google's), where reports read them.
"""
