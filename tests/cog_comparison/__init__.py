"""Runs classes with Cog's own server and with Penstock, and compares what they return."""
