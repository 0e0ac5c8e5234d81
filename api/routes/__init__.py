"""The endpoints, one function each."""
