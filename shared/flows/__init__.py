"""Flow runs: several models, one after another, for one request."""
