"""What API and workers share: the wire contract and the seams to the outside."""
