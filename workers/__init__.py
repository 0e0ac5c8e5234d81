"""The workers, which pull jobs, batch items, run models, send replies, and write rows."""

import os

# Without this, importing ONNX Runtime would start a telemetry thread, and a process with threads
# can't be forked (workers/runtime/template.py).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
