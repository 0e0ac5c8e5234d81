"""Google's own GoogleSQL analyzer: names, types and coercions of a statement, or its error."""
