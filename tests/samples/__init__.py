"""Tests of the commands and code samples in README.md and docs."""
