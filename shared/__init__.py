"""The code that the API and the workers share: the wire contract and the seams to the outside."""

import os

# Before gRPC is imported. With it, a process that uvloop forks while a call runs gets a polling
# thread of gRPC: of 600 starts 84 died or wrote an error, and some never become the program
# (https://github.com/grpc/grpc/issues/43055). None of ours uses gRPC in what it forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
