"""Set before gRPC is imported: a process that is started during a call must not start its threads.

They might prevent it from executing its program (https://github.com/grpc/grpc/issues/43055).
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
