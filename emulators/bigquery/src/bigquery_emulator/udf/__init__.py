"""GoogleSQL functions written in Python, because neither DuckDB nor SQL can provide them.

Each takes 5 to 10 µs per row, about fifty times as long as DuckDB's own functions, and holds
Python's GIL.
"""
