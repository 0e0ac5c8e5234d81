"""The calls of the Pub/Sub API, one module per resource."""
