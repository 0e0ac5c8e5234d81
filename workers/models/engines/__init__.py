"""Text generation with standard engines, which are separate servers reached over a Unix socket."""
