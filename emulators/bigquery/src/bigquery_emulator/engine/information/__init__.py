"""INFORMATION_SCHEMA: the server's datasets, tables and jobs as tables for queries."""
