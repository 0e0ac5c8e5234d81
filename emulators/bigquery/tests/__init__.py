"""Before gRPC is imported: a process that is started while a call runs must not start its threads.

They may keep it from ever becoming the program (https://github.com/grpc/grpc/issues/43055).
"""

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
