"""INFORMATION_SCHEMA: the server's datasets, tables, and jobs, which can be queried as tables."""
