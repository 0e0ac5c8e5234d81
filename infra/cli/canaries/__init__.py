"""Model canaries from an operator's perspective: `penstock canary`."""
