"""Enables tracing for a process if the environment specifies a collector.

The variables are defined by OpenTelemetry. The SDK reads most of them, and logs any it can't parse.
Mistakes that would change the cost or prevent sending are caught here, so that they stop the
process at startup.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError
from shared.tracing.spans import install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

DEFAULT_RATIO = 0.01
"""Default fraction of traces to keep. See docs/decisions/0037-traces.md."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")
_SAMPLERS = (
    *("always_on", "always_off", "parentbased_always_on", "parentbased_always_off"),
    *_RATIO_SAMPLERS,
)


@contextmanager
def export_spans(
    service: str,
    *,
    project: str,
    region: str,
    broker: str,
    instance: str = "",
    decides: bool = False,
) -> Iterator[None]:
    """Exports this process's spans inside the context, if a collector is configured.

    Args:
        service: `service.name`, unless the environment specifies a different one.
        project: Google Cloud project, which the Telemetry API requires.
        broker: `messaging.system` of spans about messages.
        instance: this process's name. Empty means the host and process ID.
        decides: True if this process decides which traces are kept. Other processes follow the
            message's flag.

    Raises:
        ConfigurationError: a variable is invalid.
    """
    if not _is_on(os.environ):
        yield
        return
    # Loading the SDK takes 40 ms and 5 MB, so it is loaded only when needed.
    from google.auth.exceptions import GoogleAuthError

    from shared.tracing.export import OtlpTracer

    facts = {
        "service.name": service,
        "service.namespace": "penstock",
        "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
        "gcp.project_id": project,
        "cloud.region": region,
    }
    try:
        tracer = OtlpTracer(facts, _sampler(os.environ, decides=decides), broker=broker)
    except (ValueError, RuntimeError, GoogleAuthError) as error:
        raise ConfigurationError(f"OTEL_*: {error}", field="OTEL_*") from error
    install(tracer)
    try:
        yield
    finally:
        install(None)
        tracer.close()


def _is_on(environment: Mapping[str, str]) -> bool:
    """Returns whether spans are exported.

    Raises:
        ConfigurationError: the variables request something this project does not support.
    """
    endpoint = next((name for name in _ENDPOINTS if environment.get(name, "").strip()), None)
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or is_disabled or exporter == "none":
        return False
    _check("OTEL_TRACES_EXPORTER", exporter, ("otlp",))
    for name in _PROTOCOLS:
        _check(name, environment.get(name, "").strip() or "http/protobuf", ("http/protobuf",))
    if not environment[endpoint].strip().startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{endpoint}: must be a URL, got {environment[endpoint]!r}", field=endpoint
        )
    return True


def _sampler(environment: Mapping[str, str], *, decides: bool) -> Sampler | None:
    """Returns this process's sampler. None means the sampler set in the environment."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

    if not decides:
        return ParentBased(ALWAYS_OFF)
    name, ratio = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower(), _ratio(environment)
    if not name:
        return ParentBased(TraceIdRatioBased(DEFAULT_RATIO if ratio is None else ratio))
    _check("OTEL_TRACES_SAMPLER", name, _SAMPLERS)
    if name in _RATIO_SAMPLERS and ratio is None:
        # The SDK's default would be 1.
        raise ConfigurationError(
            f"OTEL_TRACES_SAMPLER_ARG: {name} requires a ratio", field="OTEL_TRACES_SAMPLER_ARG"
        )
    return None


def _ratio(environment: Mapping[str, str]) -> float | None:
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if not text:
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigurationError(
            f"OTEL_TRACES_SAMPLER_ARG: must be a ratio from 0 to 1, got {text!r}",
            field="OTEL_TRACES_SAMPLER_ARG",
        )
    return ratio


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name}: must be {' or '.join(known)}, got {value!r}", field=name)
