"""Translates a GoogleSQL statement's resolved tree to DuckDB SQL."""
