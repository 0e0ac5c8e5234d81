"""Set before gRPC is imported: a process started during a call must not start gRPC's threads.

Those threads might keep the new process from executing its program
(https://github.com/grpc/grpc/issues/43055).
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
