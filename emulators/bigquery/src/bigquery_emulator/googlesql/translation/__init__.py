"""Translates the resolved tree of a GoogleSQL statement to DuckDB's SQL."""
