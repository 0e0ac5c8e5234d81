"""Protocols for calls: gRPC, REST, and the table of methods that both use."""
