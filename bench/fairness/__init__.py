"""What tenants notice of each other, and what it costs that they share by work."""
