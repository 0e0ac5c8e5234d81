"""One response for all requests with the same Idempotency-Key."""
