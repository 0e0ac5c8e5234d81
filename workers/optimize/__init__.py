"""`penstock optimize`: makes, judges and writes the optimised artifacts that workers/models/artifact.py reads."""
