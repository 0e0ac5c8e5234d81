"""Servers that stand in for Google's on one machine."""
