"""Flow runs: several models run one after another for one request."""
