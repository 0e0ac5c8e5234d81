"""Canaries of models as an operator handles them: `penstock canary`."""
