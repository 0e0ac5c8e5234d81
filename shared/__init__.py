"""Code shared by the API and the workers: the wire format, and interfaces to services."""

import os

# Must run before gRPC is imported. Otherwise, a process that uvloop forks during a call gets a gRPC
# polling thread: in 600 starts, 84 crashed or logged an error, and some never started the program
# (https://github.com/grpc/grpc/issues/43055). None of our forked processes use gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
