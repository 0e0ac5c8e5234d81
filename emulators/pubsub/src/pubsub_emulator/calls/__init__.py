"""The calls of the Pub/Sub API, one module for each resource."""
