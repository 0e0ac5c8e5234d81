"""`penstock optimize`: builds and judges the artifacts that workers/models/artifact.py reads."""
