"""Stores in Redis and in the object store."""
