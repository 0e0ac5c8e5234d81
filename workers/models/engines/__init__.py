"""Text by standard engines: separate servers, reached over a Unix socket."""
