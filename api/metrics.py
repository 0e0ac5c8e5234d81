"""The API's Prometheus metrics, and the port that serves all of the process's metrics.

Callers must not be able to reach that port, because details about models, load, and errors are for
operators only. Serving it as a path on the public port would not be safe, because a rule that
denies a path can be bypassed by spelling the path differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from shared.errors import ConfigurationError
from shared.metric_types import Level
from shared.tenants.plan import Priority

_SECONDS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    300,
)

_STOP_LIMIT_S = 5.0

REQUESTS = Counter(
    "penstock_api_requests_total", "HTTP requests answered.", ["route", "model", "status"]
)
REQUEST_SECONDS = Histogram(
    "penstock_api_request_seconds",
    "Seconds from receipt to the answer.",
    ["route", "model"],
    buckets=_SECONDS,
)
ERRORS = Counter("penstock_api_errors_total", "Error answers.", ["route", "status", "code"])
REQUESTS_OPEN = Level(Gauge("penstock_api_requests_open", "HTTP requests being answered."))
ITEMS = Counter(
    "penstock_api_items_total",
    "Items answered, by cache level and status.",
    ["model", "cache", "status"],
)
IN_FLIGHT = Gauge("penstock_api_items_in_flight", "Items waiting for a worker.", ["model", "lane"])
ADMITTED = Counter(
    "penstock_api_items_admitted_total",
    "Items admitted to wait for a worker, including items of predictions.",
    ["model", "lane"],
)
CANARY_SHARE = Gauge(
    "penstock_canary_share", "Fraction of requests sent to a model's canary.", ["model"]
)
CANARY_TAKEN_BACK = Gauge(
    "penstock_canary_taken_back", "1 if a model's canary was taken back.", ["model"]
)
CANARY_COMPARED = Counter(
    "penstock_canary_compared_total",
    "Canary results that were compared with the other revision, by whether they were within the "
    "tolerance.",
    ["model", "within"],
)
HELD = Gauge(
    "penstock_api_jobs_held",
    "Jobs waiting for room in the publish window of their model.",
    ["model"],
)
HELD_SECONDS = Histogram(
    "penstock_api_held_seconds",
    "Seconds that jobs waited for room in the publish window. Includes only jobs that waited.",
    ["model"],
    buckets=_SECONDS,
)
TENANTS = Gauge(
    "penstock_api_tenants",
    "Number of tenants with waiting items in the last quarter of a second.",
    ["model", "lane"],
)
MAX_TENANT = Gauge(
    "penstock_api_largest_tenant_items",
    "Maximum number of waiting items of a single tenant in the last quarter of a second.",
    ["model", "lane"],
)
PREDICTIONS = Counter(
    "penstock_api_predictions_total",
    "Predictions created, found again, rejected by the broker, canceled, or ended here because "
    "their deadline passed.",
    ["model", "event"],
)
SHED = Counter("penstock_api_items_shed_total", "Items rejected with 429.", ["model", "lane"])
IDEMPOTENT_REQUESTS = Counter(
    "penstock_api_keyed_requests_total",
    "Requests with an Idempotency-Key: computed, joined or repeated. not_kept: answered, but the "
    "answer was not stored.",
    ["end"],
)
IMAGES = Counter(
    "penstock_api_pictures_total",
    "Images to decode or encode, by outcome. shed: rejected with 429. *_waiting: ended before "
    "the work started.",
    ["end"],
)
IMAGES_WAITING = Gauge("penstock_api_pictures_waiting", "Images waiting to be decoded or encoded.")
CONNECTIONS_CUT = Counter(
    "penstock_api_connections_cut_total",
    "Connections that the API closed: idle, full, invalid, head_too_large, head_too_slow, unread.",
    ["reason"],
)
CONNECTIONS_UNREAD = Gauge(
    "penstock_api_connections_unread", "Connections whose callers are not reading the answer."
)
JOBS_CANCELED = Counter(
    "penstock_api_jobs_canceled_total",
    "Jobs canceled because all of their callers hung up.",
    ["model"],
)


@lru_cache(maxsize=1024)
def of_requests(route: str, model: str, status: int) -> tuple[Counter, Histogram]:
    """Returns the counter and histogram for these labels.

    Cached, because label lookups cost more than counting.
    """
    return REQUESTS.labels(route, model, str(status)), REQUEST_SECONDS.labels(route, model)


@lru_cache(maxsize=1024)
def of_errors(route: str, status: int, code: str) -> Counter:
    """Returns the counter for these labels."""
    return ERRORS.labels(route, str(status), code)


@lru_cache(maxsize=1024)
def of_items(model: str, cache: str, status: str) -> Counter:
    """Returns the counter for these labels."""
    return ITEMS.labels(model, cache, status)


@lru_cache(maxsize=1024)
def of_admission(model: str, priority: Priority) -> tuple[Counter, Counter, Gauge]:
    """Returns counters for rejected and admitted items, and a gauge for items in flight.

    The first call initializes all of them to 0.

    Args:
        model: model name in the catalog.
        priority: priority of the items.
    """
    return (
        SHED.labels(model, priority),
        ADMITTED.labels(model, priority),
        IN_FLIGHT.labels(model, priority),
    )


@contextmanager
def serve_metrics(host: str, port: int) -> Iterator[int]:
    """Serves this process's metrics while the block runs.

    Yields the port, which is random if `port` is 0.

    Raises:
        ConfigurationError: the port can't be opened.
    """
    try:
        server, thread = start_http_server(port, host)
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_METRICS_PORT: {host}:{port}: {error}", field="metrics_port"
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_STOP_LIMIT_S)
