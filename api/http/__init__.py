"""The HTTP layer: options, keys, limits, and the OpenAPI document."""
