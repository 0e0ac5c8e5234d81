"""Usage reports: parameterized GoogleSQL for the command line, the console, and schedules."""
