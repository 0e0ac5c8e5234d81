"""The workers: pull jobs, batch, run the model, reply, and leave a row."""

import os

# ONNX Runtime reads it when it is imported, and else starts a thread that sends telemetry: no business of ours, and a
# process with a thread can't be forked from (workers/runtime/template_process.py).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
