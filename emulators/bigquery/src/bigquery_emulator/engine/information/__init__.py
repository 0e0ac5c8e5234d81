"""INFORMATION_SCHEMA: what the server knows of data sets, tables and jobs, as tables of queries."""
