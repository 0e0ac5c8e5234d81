"""Reports on the command line: commands, formats, and the tables that reports read."""
