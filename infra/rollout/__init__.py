"""Rolling the API out on Cloud Run: the newest revision is tried, then given more and more traffic."""
