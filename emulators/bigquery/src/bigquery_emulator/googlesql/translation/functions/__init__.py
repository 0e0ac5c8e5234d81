"""GoogleSQL's functions in DuckDB's words, by name and types of arguments.

Only what is known to give BigQuery's answer has a translation. Everything else is refused: a wrong
number in a report costs more than an error.
"""
