"""Servers that replace Google's on one machine."""
