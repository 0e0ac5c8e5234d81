"""Command-line reports: commands, formats, and the tables that reports read."""
