"""The code that the API and the workers share: the wire contract and the seams to the outside."""
