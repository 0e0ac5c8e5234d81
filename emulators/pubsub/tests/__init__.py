"""Set before gRPC is imported: a process started during a call must not start gRPC's threads.

The threads might keep it from executing its program (https://github.com/grpc/grpc/issues/43055).
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
