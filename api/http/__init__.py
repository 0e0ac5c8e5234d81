"""What HTTP brings and needs: options, keys, limits, the OpenAPI document."""
