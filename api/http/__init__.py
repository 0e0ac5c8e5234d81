"""The HTTP layer: options, keys, limits, the OpenAPI document."""
