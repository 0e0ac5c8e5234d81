"""Text generation with standard engines: separate servers, reached over a Unix socket."""
