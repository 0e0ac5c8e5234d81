"""Rolls the API out on Cloud Run: tests the newest revision, then increases its traffic."""
