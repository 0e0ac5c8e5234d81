"""Logs JSON lines to stderr with Cloud Logging's fields (severity, message, time, trace).

https://cloud.google.com/logging/docs/structured-logging. Log lines about a request or a job include
its trace so that Cloud Logging and Cloud Trace can show them together. Payloads and keys are never
logged. The secret parts of API keys that callers send in the wrong place are redacted from every
line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from shared.tenants.api_key import without_keys
from shared.tracing.spans import current

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line. Each key in `extra` becomes a field.

    Args:
        project: Google Cloud project, for full trace names.
    """

    def __init__(self, project: str) -> None:
        super().__init__()
        self._project = project

    def format(self, record: logging.LogRecord) -> str:
        """Returns a single line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if (trace := current()) is not None:
            line |= {
                "logging.googleapis.com/trace": f"projects/{self._project}/traces/{trace.trace_id}",
                "logging.googleapis.com/spanId": trace.span_id,
                "logging.googleapis.com/trace_sampled": trace.is_sampled,
            }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return without_keys(json.dumps(line, default=str, ensure_ascii=False))


def configure_logs(level: str, project: str = "") -> None:
    """Sends every record at or above `level` to stderr as JSON. Called once, in `__main__`.

    `project` is the Google Cloud project. Processes that don't handle requests can omit it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(project))
    logging.basicConfig(level=level, handlers=[handler], force=True)
