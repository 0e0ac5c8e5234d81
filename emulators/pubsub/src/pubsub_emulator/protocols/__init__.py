"""Protocols for calls: gRPC, REST, and the method table that both use."""
