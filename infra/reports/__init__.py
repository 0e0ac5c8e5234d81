"""Command-line reports: commands, formats, and the tables that the reports read."""
