"""`penstock optimize`: makes, judges and writes the optimized artifacts that workers/models/artifact.py reads."""
