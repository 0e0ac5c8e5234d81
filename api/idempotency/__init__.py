"""One answer for all requests with the same Idempotency-Key."""
