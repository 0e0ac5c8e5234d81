"""Variables that turn tracing on, values that abort startup, and which traces are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.tracing.setup import DEFAULT_RATIO, export_spans
from shared.tracing.spans import TraceContext, begin, is_recorded, record
from tests.kept_spans import new_trace
from tests.limits import START_LIMIT_S
from tests.otlp import Collector, ReceivedSpan

ROOT = Path(__file__).parents[2]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = 4000


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> pytest.MonkeyPatch:
    """An environment that configures a collector."""
    monkeypatch.setenv(ENDPOINT, collector.url)
    return monkeypatch


def tracing(*, decides: bool = True) -> AbstractContextManager[None]:
    return export_spans("penstock-test", project="p", region="r", broker="b", decides=decides)


def kept_share() -> float:
    """Returns the fraction of traces started in this process that are kept."""
    spans = [begin("asked", "server", 1.0, None) for _ in range(TRACES)]
    # A trace that starts here and is not kept needs no id.
    assert all((span.context is not None) == span.is_recorded for span in spans)
    return sum(span.is_recorded for span in spans) / TRACES


def exported(collector: Collector, trace: TraceContext, name: str = "done") -> ReceivedSpan:
    """A span in `trace`, created now, as the collector receives it."""
    record(name, "internal", (1.0, 2.0), {}, parent=trace)
    collector.until(lambda: bool(collector.of_trace(trace.trace_id)))
    return collector.of_trace(trace.trace_id)[0]


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    # redis imports the SDK's metrics on its own if the SDK is installed.
    code = (
        "import sys, api.__main__, workers.__main__, workers.functions.dependencies;"
        "from shared.tracing.setup import export_spans\n"
        "with export_spans('penstock-test', project='p', region='r', broker='b', decides=True):\n"
        "    print(sorted(n for n in sys.modules if n.startswith(('opentelemetry.sdk.trace', "
        "'opentelemetry.exporter'))))"
    )
    environment = {name: value for name, value in os.environ.items() if "OTEL" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"), (ENDPOINT, " ")],
)
def test_standard_switches_turn_it_off(
    environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    environment.setenv(name, value)
    with tracing():
        assert not is_recorded(new_trace())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (ENDPOINT, "collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),  # without a ratio, the SDK uses 1
        ("OTEL_TRACES_SAMPLER_ARG", "1%"),
        ("OTEL_TRACES_SAMPLER_ARG", "2"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "7"),  # less than a batch
    ],
)
def test_wrong_variable_ends_the_start(
    environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"^OTEL_"), tracing():
        pass


def test_one_trace_in_a_hundred_is_kept_unless_said_otherwise(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100000")
    with tracing():
        assert kept_share() == pytest.approx(DEFAULT_RATIO, abs=0.01)
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with tracing():
        assert kept_share() == pytest.approx(0.5, abs=0.05)
    environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with tracing():
        assert kept_share() == 0


@pytest.mark.parametrize("flags", ["00", "01"])
def test_caller_decides_about_its_trace_unless_the_sampler_says_otherwise(
    environment: pytest.MonkeyPatch, flags: str
) -> None:
    caller = new_trace(flags)
    with tracing():
        span = begin("asked", "server", 1.0, caller)
        assert (span.is_recorded, span.context and span.context.is_sampled) == (
            flags == "01",
            flags == "01",
        )
        assert span.context is not None
        assert span.context.trace_id == caller.trace_id
        assert (span.context == caller) == (flags == "00")
    environment.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with tracing():
        span = begin("asked", "server", 1.0, caller)
        assert span.context is not None
        assert (span.is_recorded, span.context.is_sampled) == (False, False)
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
    with tracing():
        span = begin("asked", "server", 1.0, caller)
        assert span.context is not None
        assert (span.is_recorded, span.context.is_sampled) == (True, True)
        assert span.context.trace_id == caller.trace_id


def test_worker_keeps_what_the_api_decided_to_keep(
    environment: pytest.MonkeyPatch, collector: Collector
) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with tracing(decides=False):
        assert not is_recorded(new_trace("00"))
        kept = new_trace()
        assert exported(collector, kept).parent_id == kept.span_id


def test_environment_is_above_what_a_process_knows_of_itself(
    environment: pytest.MonkeyPatch, collector: Collector
) -> None:
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with tracing():
        resource = exported(collector, new_trace()).resource
    assert (resource["service.name"], resource["gcp.project_id"]) == ("penstock-test", "p")
    environment.setenv("OTEL_SERVICE_NAME", "ours")
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "gcp.project_id=other,team=blue")
    with tracing():
        resource = exported(collector, new_trace()).resource
    assert (resource["service.name"], resource["gcp.project_id"], resource["team"]) == (
        "ours",
        "other",
        "blue",
    )
