"""Safe access to URLs that callers choose."""
