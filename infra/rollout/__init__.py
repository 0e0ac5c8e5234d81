"""Rolls out the API on Cloud Run: tests the newest revision, then increases its traffic."""
