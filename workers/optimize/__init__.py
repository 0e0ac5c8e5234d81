"""`penstock optimize`: builds and evaluates the artifacts read by workers/models/artifact.py."""
