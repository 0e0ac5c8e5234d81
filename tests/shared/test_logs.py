"""A log line in the format Cloud Logging reads."""

from __future__ import annotations

import json
import logging
from typing import Any

from shared.logs import JsonFormatter
from shared.tracing.spans import use_context
from tests.kept_spans import new_trace

TRACE_FIELD = "logging.googleapis.com/trace"


def line(level: int = logging.WARNING, **extra: Any) -> dict[str, Any]:
    record = logging.LogRecord("penstock.test", level, __file__, 1, "said %s", ("so",), None)
    vars(record).update(extra)
    formatted = JsonFormatter("my-project").format(record)
    assert "\n" not in formatted
    found: dict[str, Any] = json.loads(formatted)
    return found


def test_line_has_severity_message_and_fields() -> None:
    found = line(request_id="req_1")
    assert {name: found[name] for name in ("severity", "logger", "message", "request_id")} == {
        "severity": "WARNING",
        "logger": "penstock.test",
        "message": "said so",
        "request_id": "req_1",
    }
    assert TRACE_FIELD not in found


def test_line_of_a_request_has_its_trace() -> None:
    for flags, is_sampled in (("01", True), ("00", False)):
        trace = new_trace(flags)
        with use_context(trace):
            found = line(logging.ERROR)
        assert found[TRACE_FIELD] == f"projects/my-project/traces/{trace.trace_id}"
        assert found["logging.googleapis.com/spanId"] == trace.span_id
        assert found["logging.googleapis.com/trace_sampled"] is is_sampled
