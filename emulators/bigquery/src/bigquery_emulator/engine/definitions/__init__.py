"""GoogleSQL's data definition language: statements, columns, options, and table changes."""
