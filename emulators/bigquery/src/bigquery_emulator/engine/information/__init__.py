"""INFORMATION_SCHEMA: the server's datasets, tables and jobs, queryable as tables."""
