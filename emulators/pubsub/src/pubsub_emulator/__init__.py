"""The embedded Pub/Sub: a `google.pubsub.v1` gRPC server in memory.

`server.serve` opens one in a program.
"""
