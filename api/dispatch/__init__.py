"""From a request to its results: single-flight, jobs, admission, replies."""
