"""Reports on the command line: their commands and formats, and the tables that they read."""
