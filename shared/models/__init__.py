"""Definitions of everything that can be served: the catalog, its entries, and tasks."""
