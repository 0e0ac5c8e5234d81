"""Text by standard engines: servers of their own, spoken to over a Unix socket."""
