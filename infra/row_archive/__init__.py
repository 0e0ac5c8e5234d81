"""The row archive: Parquet files in the object store, made of the rows that processes put there.

Writers put compressed lines into `incoming/TABLE` (shared/usage/senders.py). `python -m
infra.row_archive` takes them from there, writes `archive/TABLE/day=YYYY-MM-DD/*.parquet`, and loads
the same rows into BigQuery, the embedded one or Google's, where the reports read them.
"""
