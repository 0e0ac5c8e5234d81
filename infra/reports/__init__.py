"""Command-line reports: commands, formats, and the tables the reports read."""
