"""Google's own analyzer of GoogleSQL: names, types and coercions of a statement, or its error."""
