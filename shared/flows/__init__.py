"""Flow runs: several models run in sequence for one request."""
