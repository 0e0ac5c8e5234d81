"""Reports on usage: GoogleSQL with parameters, for the command line, the console and schedules."""
