"""Which model and which batch runs next."""
