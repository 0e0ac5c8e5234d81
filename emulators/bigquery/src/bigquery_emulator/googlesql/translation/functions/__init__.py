"""Translates GoogleSQL's functions to DuckDB, by name and argument types.

Only functions known to return the same result as BigQuery have a translation. Everything else is
rejected, because a wrong number in a report costs more than an error.
"""
