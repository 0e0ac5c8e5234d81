"""GoogleSQL on DuckDB: reads a statement, names its tables, and writes it in DuckDB's words.

Between a query job and the store. `translate` is the entry point. Anything that might answer
differently is refused.
"""
