"""GoogleSQL's data definition: the statements, their columns, options, and changes of tables."""
