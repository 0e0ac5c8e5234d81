"""Stored data: datasets and tables, their schemas and settings, and reading and writing rows."""
