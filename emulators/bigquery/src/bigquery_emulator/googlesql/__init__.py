"""GoogleSQL on DuckDB: parses a statement, resolves its tables, and translates it to DuckDB SQL.

This layer sits between a query job and the store. The entry point is `translate`. Anything that
might return a different result than in BigQuery is rejected.
"""
