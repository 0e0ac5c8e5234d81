"""The local stack: the whole pipeline on one machine."""
