"""Google's own GoogleSQL analyzer: a statement's names, types, and coercions, or its error."""
