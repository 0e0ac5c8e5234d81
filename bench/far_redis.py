"""What a Redis that is far away costs: a proxy (bench/distant_link.py) delays each direction.

First the API: another one on the running pipeline, whose Redis is behind the proxy. It asks the
cache before it sends a job. Its memory cache is off, so hits come from Redis. Then a worker with a
model that takes no time (bench/fairness/timed.py): it tells Redis of each job, but waits for it
only if a job waited in the topic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import item_cost
from bench.distant_link import distant
from bench.pipeline import Pipeline, running
from bench.report import Figure, Outcome

DELAYS_MS = (0.0, 1.0, 5.0)
ALONE, TOGETHER = 60, 1000
IN_FLIGHT = 128


def run() -> Outcome:
    """Measures an API and a worker at each distance."""
    figures, details = list[Figure](), dict[str, Any]()
    with running() as pipeline, tempfile.TemporaryDirectory() as folder:
        for delay_ms in DELAYS_MS:
            figures += _of_an_api(pipeline, delay_ms, Path(folder))
    for delay_ms in DELAYS_MS:
        round_ = item_cost.measure(has_rows=True, redis_delay_ms=delay_ms)
        name = f"worker, Redis {delay_ms:g} ms away"
        details[name] = round_
        figures.append(Figure(f"{name}: items", round_["items_per_s"], "/s"))
        figures.append(Figure(f"{name}: items per CPU s", round_["items_per_cpu_s"], "/s"))
    return Outcome(figures, details)


def _of_an_api(pipeline: Pipeline, delay_ms: float, folder: Path) -> list[Figure]:
    url = pipeline.stack.settings.redis_url
    port = urlsplit(url).port or 0
    with (
        distant(port, delay_ms, folder) as link,
        pipeline.another_api(
            redis_url=url.replace(f":{port}", f":{link}"), memory_cache_bytes=0
        ) as api,
    ):
        texts = pipeline.texts.short(ALONE)
        misses = pipeline.ask(texts, 1, cache="miss", port=api.port)
        hits = pipeline.ask(texts, 1, cache="hit", port=api.port)
        many = pipeline.ask(pipeline.texts.short(TOGETHER), IN_FLIGHT, cache="miss", port=api.port)
    name = f"API, Redis {delay_ms:g} ms away"
    return [
        Figure(f"{name}: hit alone, p50", hits.round_trip()["p50"], "ms"),
        Figure(f"{name}: miss alone without model, p50", misses.overhead()["p50"], "ms"),
        Figure(f"{name}: rate at {IN_FLIGHT} in flight", many.rate, "/s"),
    ]
