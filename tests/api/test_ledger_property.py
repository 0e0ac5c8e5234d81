"""Any mix of requests with any ends: afterwards the three books agree, and no budget is exceeded.

Answers, rows and counters are compared per key and tenant (tests/api/ledger.py). An example is a
list of waves. The requests of a wave are in flight together: model processes are held until those
that hang up, are late or are canceled have ended. Then a process may die, or the month may turn. No
example waits for a clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings

from api.batch_runner.runner import opened_runner
from api.idempotency.store import IdempotencyStore
from api.limits.limiter import Limiter
from shared.canary.store import CanaryStore
from shared.catalog import Catalog, Model
from shared.catalog_entry import Batch, Cache, Canary, Price
from shared.errors import ModelFailed, PenstockError, Unavailable
from shared.in_memory_broker import InMemoryBroker
from shared.settings import ApiSettings
from shared.tasks import Result
from shared.tenants.plan import Limits, Plan
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.batches.batching import OVER as BATCH_OVER
from tests.api.batches.batching import created, jsonl, line
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, already_open, running_api, settings_for
from tests.api.ledger import EXACT_USD, PRICED, Ledger
from tests.api.mixtures import (
    DEATHS,
    INSTANCES,
    NAMES,
    PREDICTIONS,
    RUNNER,
    UNPAID,
    Ask,
    Mixture,
    Wave,
    mixtures,
)
from tests.api.mortal import Mortal
from tests.api.moved_clock import MovedClock
from tests.api.predicting import OVER
from tests.api.test_generation_charges import LONG
from tests.faults.links import Links
from tests.keys import bearer, key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S
from tests.tiers import examples
from tests.workers.test_steps import spelling
from tests.workers.worker_harness import (
    LetterPool,
    LetterProcess,
    PaintProcess,
    WorkerHarness,
    running_worker,
)
from workers.jobs.canary_share import CanaryShare
from workers.tasks import WORKER_TASKS

pytestmark = pytest.mark.anyio

PAINTER = Model(
    name="painter",
    task="image",
    source="local:nowhere",
    batch=Batch(max_pixel_steps=10**6, max_items=4),
    cache=Cache(ttl_s=60, scope="tenant"),
    price=Price(per_million_pixel_steps_usd=0.5, cached_share=0.25),
)
SPELLER = LONG.model_copy(update={"name": "speller"})
REVISED = PRICED.model_copy(
    update={
        "name": "revised",
        "revision": "1",
        # Whatever it does here, it keeps its share.
        "canary": Canary(
            revision="2", share=0.5, compare_share=0.5, error_ratio=0.99, p95_ratio=1e6
        ),
    }
)
CATALOG = Catalog((PRICED, PAINTER, SPELLER, REVISED))
CANARY = CATALOG.canaries[REVISED.name]
PROCESSES = ("api-0", "api-1", "batches")
BEFORE_TURN_S, AFTER_TURN_S = 5.0, 1.0
MANY = 600
"""Sets of keys, one for each example. So what an example leaves behind is no other's."""
RICH_USD, POOR_USD, OWN_USD = 1000.0, 0.05, 0.04
TENANTS = {"one": "rich", "two": "rich", "poor": "poor", "open": "open"}
PLANS = {
    "rich": Plan(budget_usd_per_month=RICH_USD),
    "poor": Plan(budget_usd_per_month=POOR_USD),
    "open": Plan(budget_usd_per_month=POOR_USD, on_limit_store_outage="allow"),
}
LATE_MS = "40"
PATIENT = "wait=2"
"""Of who waits for a prediction. One that is late waits in vain, as long as its model is held."""
LEASE_S = 1.0
"""For so long nobody takes over what a process that died was doing."""
ENDLESS = 10**6
"""Tokens that nobody waits for."""
SMALL = {"size": "64x64", "num_inference_steps": 4}


@dataclass(repr=False)
class Mixed:
    """API instances, each with its own connection to Redis, a runner of batches, and workers."""

    links: Links
    settings: ApiSettings
    clock: MovedClock
    canary: WorkerHarness
    revised: WorkerHarness
    letters: WorkerHarness
    painter: WorkerHarness
    speller: WorkerHarness
    ledger: Ledger
    canary_store: CanaryStore
    processes: list[Mortal[Any]] = field(default_factory=list)
    used: itertools.count[int] = field(default_factory=itertools.count)

    def __repr__(self) -> str:
        return "world"

    @property
    def workers(self) -> list[WorkerHarness]:
        """The canary's first, as it leaves to the other revision what it can't do."""
        return [self.canary, self.revised, self.letters, self.painter, self.speller]

    @property
    def held(self) -> list[WorkerHarness]:
        return [self.canary, self.revised, self.letters, self.painter]

    def hold(self) -> None:
        for worker in self.held:
            worker.process.gate.clear()

    def let_go(self) -> None:
        for worker in self.held:
            worker.process.gate.set()

    async def until_workers_idle(self) -> None:
        for worker in self.workers:
            assert worker.registry is not None
            await worker.registry.wait_idle()

    def lose_redis(self, outage: str) -> None:
        begin = self.links.cut if outage == "cut off" else self.links.lose_answers
        for name in PROCESSES[:INSTANCES]:
            begin(name)

    def heal(self) -> None:
        for name in PROCESSES:
            self.links.heal(name)

    def place(self, number: int) -> None:
        """Puts a process that was started into the ledger."""
        process = self.processes[number].process
        if number == RUNNER:
            self.ledger.limiters[:] = [process]
        else:
            self.ledger.apis[number : number + 1] = [process]

    def limiter(self, number: int) -> Limiter:
        """Of a process."""
        if number == RUNNER:
            return self.ledger.limiters[0]
        return self.ledger.apis[number].dependencies.limiter


def every_key(folder: Path) -> str:
    """Writes the keys of all examples. Returns the URL."""
    keys, tenants = [], {}
    for number in range(MANY):
        for name in NAMES:
            tenant = f"{TENANTS[name]}-{number}"
            own = Limits(budget_usd_per_month=OWN_USD if name == "two" else RICH_USD)
            keys.append(stored(f"{name}-{number}", tenant, limits=own))
            tenants[tenant] = TENANTS[name]
    return keys_url(folder, plans=PLANS, tenants=tenants, keys=keys)


class UnlikeProcess(LetterProcess):
    """Of the canary: it can't do one of the texts that the other revision can."""

    def _result(self, text: str) -> Result | PenstockError:
        return ModelFailed("not here") if text == _text(4) else super()._result(text)


@pytest.fixture
def clock(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MovedClock]:
    made = MovedClock(redis_url, monkeypatch)
    yield made
    made.close()


@pytest.fixture
async def world(
    redis_url: str, tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Mixed]:
    for name, seconds in (("POLL_S", 0.05), ("ELSEWHERE_S", 0.05)):
        monkeypatch.setattr(f"api.batch_runner.runner.{name}", seconds)
    monkeypatch.setitem(IdempotencyStore.__init__.__kwdefaults__ or {}, "lease_s", LEASE_S)
    port = urlsplit(redis_url).port
    assert port is not None
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=every_key(tmp_path))
    async with AsyncExitStack() as opened:
        links = opened.enter_context(Links(dict.fromkeys(PROCESSES, port)))
        broker = InMemoryBroker()
        canary_store = await opened.enter_async_context(CanaryStore(redis_url))
        workers: dict[str, Any] = await _workers(opened, redis_url, tmp_path, broker, canary_store)
        ledger = Ledger(redis_url, [], [one.rows for one in workers.values()], _nothing)
        world = Mixed(
            links, settings, clock=clock, canary_store=canary_store, ledger=ledger, **workers
        )
        ledger.until_idle = world.until_workers_idle
        for name in PROCESSES:
            url = f"redis://127.0.0.1:{links.port(name)}/0"
            own = settings.model_copy(update={"redis_url": url})
            made = partial(_runner if name == PROCESSES[RUNNER] else _api, own)
            mortal = Mortal[Any](name, links, broker, made, ledger)
            world.processes.append(await opened.enter_async_context(mortal))
            world.place(len(world.processes) - 1)
        yield world


async def _workers(
    opened: AsyncExitStack,
    redis_url: str,
    folder: Path,
    broker: InMemoryBroker,
    canary_store: CanaryStore,
) -> dict[str, WorkerHarness]:
    """Opens a worker of each model."""

    def running(model: Model, **given: Any) -> AbstractAsyncContextManager[WorkerHarness]:
        return running_worker(redis_url, folder, model=model, broker=broker, **given)

    def part(model: Model) -> CanaryShare:
        return CanaryShare(model, CANARY, canary_store, broker, refresh_s=0.05)

    pools = [LetterPool(UnlikeProcess()), LetterPool(PaintProcess())]
    preparer = WORKER_TASKS["image"].preparer(PAINTER, Path())
    made = {
        "canary": running(CANARY, pool=pools[0], canary=part(CANARY)),
        "revised": running(REVISED, canary=part(REVISED)),
        "letters": running(PRICED),
        "painter": running(PAINTER, pool=pools[1], preparer=preparer),
        "speller": spelling(redis_url, folder, model=SPELLER, broker=broker),
    }
    return {name: await opened.enter_async_context(one) for name, one in made.items()}


async def _nothing() -> None:
    return None


@asynccontextmanager
async def _api(settings: ApiSettings, door: Any, rows: list[Row]) -> AsyncIterator[ApiUnderTest]:
    worker = FakeWorker(door, ())
    async with running_api(settings, door, door, CATALOG, worker=worker, written=rows) as api:
        yield api


@asynccontextmanager
async def _runner(settings: ApiSettings, door: Any, rows: list[Row]) -> AsyncIterator[Limiter]:
    parts = (already_open(door), already_open(door), RowList(rows))
    async with opened_runner(settings, CATALOG, *parts, lease_s=LEASE_S) as runner:
        running = asyncio.create_task(runner.run())
        try:
            yield runner._tools.executor.limiter
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@dataclass(repr=False)
class Mix:
    """One example: its own tenants, what was asked, and what the answers said."""

    world: Mixed
    number: int
    ledger: Ledger
    fresh: itertools.count[int] = field(default_factory=itertools.count)
    noted: dict[str, float] = field(default_factory=dict)
    """What predictions said before they were deleted, by id."""
    untold: set[str] = field(default_factory=set)
    """Predictions that were deleted before anybody could read what they cost."""
    own_ids: dict[str, str] = field(default_factory=dict)
    """Of predictions that their callers named, by the id of the request that created them."""
    silent: set[str] = field(default_factory=set)
    """Requests whose callers were not told what they cost, by the id they sent: those whose answers
    are kept although their callers hung up, and those of a process that died."""
    spare_usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What processes that died could have given back, by the names of counters."""

    def key(self, name: str) -> str:
        return f"{name}-{self.number}"

    async def run(self, mixture: Mixture) -> None:
        self.world.let_go()
        await self.world.canary_store.resume(CANARY)
        if mixture.turn is None:
            self.world.clock.move(0)
        else:
            self.world.clock.move_to_turn(BEFORE_TURN_S)
        running = [await self._batch(one) for one in mixture.batches]
        for number, wave in enumerate(mixture.waves):
            await self._wave(wave, turns=number == mixture.turn)
        await asyncio.gather(*running)

    async def _wave(self, wave: Wave, *, turns: bool) -> None:
        self.world.hold()
        if wave.outage:
            self.world.lose_redis(wave.outage)
        names = [f"{self.number}-{one.key}-{next(self.fresh)}" for one in wave.asks]
        asked = [
            asyncio.create_task(self._ask(one, name))
            for one, name in zip(wave.asks, names, strict=True)
        ]
        ending = [task for one, task in zip(wave.asks, asked, strict=True) if one.ends_early]
        if ending:
            await asyncio.wait(ending)
        if wave.dies is not None:
            await self._kill(wave.dies, list(zip(wave.asks, names, asked, strict=True)))
        if turns:
            self.world.clock.move_to_turn(-AFTER_TURN_S)
        self.world.letters.process.deaths = int(wave.model_dies)
        self.world.let_go()
        if wave.outage:
            self.world.heal()
        await asyncio.gather(*(one for one in asked if not one.cancelled()))

    async def _kill(
        self, number: int, asked: Sequence[tuple[Ask, str, asyncio.Task[None]]]
    ) -> None:
        """Kills a process that has told Redis what it did while that was away."""
        limiter = self.world.limiter(number)
        with suppress(Unavailable):
            await limiter.store.wait_up(WAIT_LIMIT_S)
            await limiter.give_back(limiter._clock())
        waiting = [one for one in asked if one[0].instance == number and not one[2].done()]
        await self.world.processes[number].die([task for _, _, task in waiting])
        self.silent |= {name for one, name, _ in waiting if one.kind not in PREDICTIONS}
        for name, usd in (await self.ledger.held_usd(limiter.store._instance)).items():
            self.spare_usd[name] += usd
        self.world.place(number)

    def _body(self, one: Ask) -> tuple[str, dict[str, Any]]:
        """The path and the body. What is not to be answered has something that nobody else asks."""
        own = one.ends_early
        number = next(self.fresh) if own and not one.repeats else 0
        texts = [_text(item) for item in one.items] + ([_own(number)] if own else [])
        first = one.items[0]
        if one.kind in ("texts", "revised"):
            model = PRICED if one.kind == "texts" else REVISED
            body = {"model": model.name, "input": texts, "encoding_format": "base64"}
            return "/v1/embeddings", body
        seed = 100 + number if own else first
        if one.kind == "image":
            prompt = "!" if first == 8 else "a circle"
            asked = {"model": PAINTER.name, "prompt": prompt, "seed": seed}
            return "/v1/images/generations", {**asked, **SMALL}
        if one.kind == "prediction":
            return "/v1/predictions", {
                "version": PRICED.name,
                "input": {"text": texts[-1]},
            }
        if one.kind == "drawing":
            drawn: dict[str, Any] = {"prompt": "a circle", "seed": seed, "width": 64, "height": 64}
            return "/v1/predictions", {"version": PAINTER.name, "input": drawn}
        tokens = ENDLESS if own else 3
        # A text whose step fails is computed alone afterwards, and would wait for the endless ones.
        prompt = texts[-1].replace("!", "?") + "a"
        text = {"model": SPELLER.name, "prompt": prompt, "max_tokens": tokens}
        return "/v1/completions", {**text, "temperature": 0, "stream": one.kind == "stream"}

    async def _ask(self, one: Ask, mine: str) -> None:
        path, body = self._body(one)
        headers = dict(bearer(self.key(one.key)))
        if one.repeats:
            headers["idempotency-key"] = f"{one.kind}-{one.repeats}"
        if one.end == "late":
            headers["x-penstock-deadline-ms"] = LATE_MS
        if one.waits and one.kind in ("prediction", "drawing"):
            headers["prefer"] = PATIENT
        headers["x-request-id"] = mine
        http = self.ledger.apis[one.instance].http
        if one.is_put and path == "/v1/predictions":
            own_id = f"{TENANTS[one.key]}-{one.repeats}"
            path, self.own_ids[mine] = f"{path}/{own_id}", own_id
            headers.pop("idempotency-key", None)
        sent = asyncio.create_task(self._sent(one, http, path, body, headers))
        if one.end == "hang up at once":
            for _ in range(20):
                await asyncio.sleep(0)
        elif one.end == "hang up":
            await self.world.letters.until(lambda: sent.done() or self._waits_for_workers())
        if one.end.startswith("hang up"):
            sent.cancel()
            await asyncio.wait([sent])
            if one.repeats and one.kind not in PREDICTIONS:
                self.silent.add(mine)
        else:
            await sent

    def _waits_for_workers(self) -> bool:
        return any(api.dependencies.dispatcher.in_flight for api in self.ledger.apis)

    async def _sent(
        self, one: Ask, http: httpx.AsyncClient, path: str, body: object, headers: dict[str, str]
    ) -> None:
        if one.kind == "stream" and one.ends_early:
            async with http.stream("POST", path, json=body, headers=headers) as answer:
                async for text in answer.aiter_lines():
                    if text.startswith("data: {"):
                        break
        else:
            method = "PUT" if path.startswith("/v1/predictions/") else "POST"
            answer = await http.request(method, path, json=body, headers=headers)
        assert answer.status_code < 500 or answer.status_code in (500, 503, 504), answer
        if one.kind not in PREDICTIONS:
            self.ledger.tell(self.key(one.key), float(answer.headers.get("x-penstock-cost-usd", 0)))
        elif one.kind != "stream" and answer.is_success:
            await self._end_prediction(one, http, answer.json()["id"])

    async def _end_prediction(self, one: Ask, http: httpx.AsyncClient, made: str) -> None:
        key = bearer(self.key(one.key))
        if one.end == "cancel beside delete":
            self.untold.add(made)
            url = f"/v1/predictions/{made}"
            canceling = http.post(f"{url}/cancel", headers=key)
            _, deleted = await asyncio.gather(canceling, http.delete(url, headers=key))
            if deleted.status_code == 409:  # the cancel came second
                await http.delete(url, headers=key)
        elif one.end.startswith("cancel"):
            await http.post(f"/v1/predictions/{made}/cancel", headers=key)
        elif one.end == "delete":
            found = await self._over(http, made, key)
            self.noted[made] = cost_of(found)
        if one.end == "cancel and delete":
            self.untold.add(made)
        if one.end in ("cancel and delete", "delete"):
            await http.delete(f"/v1/predictions/{made}", headers=key)

    async def _over(
        self, http: httpx.AsyncClient, made: str, key: Mapping[str, str]
    ) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                answer = await http.get(f"/v1/predictions/{made}", headers=key)
                found: dict[str, Any] = answer.json()
                if answer.status_code == 404 or found.get("status") in OVER:
                    return found
                await asyncio.sleep(0.01)

    async def _batch(self, one: Ask) -> asyncio.Task[None]:
        """Creates a batch. Returns what ends with it."""
        client = self.ledger.apis[0].openai(api_key=key_for(self.key(one.key)))
        given = {"model": PRICED.name, "encoding_format": "base64"}
        lines = [line(str(at), **given, input=[_text(item)]) for at, item in enumerate(one.items)]
        batch = await created(client, jsonl(lines))
        if one.end == "cancel":
            await client.batches.cancel(batch.id)
        return asyncio.create_task(self._until_over(one, batch.id))

    async def _until_over(self, one: Ask, batch: str) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                # The instance may have died, and the next one is not there yet.
                with suppress(httpx.TransportError, RuntimeError):
                    http, key = self.ledger.apis[0].http, bearer(self.key(one.key))
                    answer = await http.get(f"/v1/batches/{batch}", headers=key)
                    if answer.json().get("status") in BATCH_OVER:
                        return
                await asyncio.sleep(0.02)

    async def settle(self) -> None:
        """Ends what nobody waits for any more, and notes what predictions say."""
        for name in NAMES:
            for one in await self._listed(name):
                if one["status"] not in OVER:
                    await self._answered("POST", f"/v1/predictions/{one['id']}/cancel", name)
        for api in self.ledger.apis:
            await api.until_idle()
        await self.ledger.until_idle()
        said = dict(self.noted)
        for name in NAMES:
            http, key = self.ledger.apis[0].http, bearer(self.key(name))
            for one in await self._listed(name):
                said[one["id"]] = cost_of(await self._over(http, one["id"], key))
        await self.ledger.until_idle()
        self._tell(said)

    def _tell(self, said: dict[str, float]) -> None:
        """Tells the ledger what predictions say. Rows know whose they are.

        Nobody was told of a kept answer whose caller hung up, nor of a line of a batch.
        """
        keys = {stored(key, tenant).id: key for key, tenant in self.ledger.tenant_of.items()}
        for row in self.ledger.rows():
            key = keys.get(row.key_id or "")
            if key is None or row.status == "refused":
                continue  # it created nothing, though the id that it asked for may exist
            is_untold = row.client_request_id in self.silent or row.batch_id
            made = self.own_ids.get(row.client_request_id or "", row.request_id)
            if is_untold or made in self.untold:
                self.ledger.tell(key, row.cost_usd or 0.0)
            elif made in said:
                self.ledger.tell(key, said.pop(made))
        assert not any(said.values()), f"predictions without rows say {said}"

    async def _listed(self, name: str) -> list[dict[str, Any]]:
        path, found = "/v1/predictions", list[dict[str, Any]]()
        while path:
            page = await self._answered("GET", path, name)
            found += page["results"]
            path = page["next"]
        return found

    async def _answered(self, method: str, path: str, name: str) -> dict[str, Any]:
        """Repeats a request while Redis can't be reached yet."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                http, key = self.ledger.apis[0].http, bearer(self.key(name))
                answer = await http.request(method, path, headers=key)
                if answer.status_code != 503:
                    assert answer.is_success, answer.text
                    found: dict[str, Any] = answer.json()
                    return found
                await asyncio.sleep(0.01)


def check_bounds(ledger: Ledger, times: int) -> None:
    """No budget is exceeded. Without Redis each instance spends its part of what it knows is left.

    If it does not know what was spent, that is its part of the whole budget. So all together spend
    at most one budget more (docs/reference/limits.md).
    """
    two = {stored(key, tenant).id for key, tenant in ledger.tenant_of.items() if key[:3] == "two"}
    for name, months in ledger.charged_by_month().items():
        kind, tenant, *key = name.split(":")
        if kind == "t":
            budget_usd = PLANS[tenant.partition("-")[0]].budget_usd_per_month
        else:
            budget_usd = OWN_USD if key[0] in two else RICH_USD
        assert budget_usd is not None
        for month, usd in months.items():
            assert usd <= times * budget_usd + EXACT_USD, f"{name} spent {usd} in {month}"


def cost_of(prediction: Mapping[str, Any]) -> float:
    return float((prediction.get("metrics") or {}).get("cost_usd") or 0)


def _text(item: int) -> str:
    return ("aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff", "gggg", "0", "!")[item]


def _own(number: int) -> str:
    return "own" + "".join("abcdefghij"[int(digit)] for digit in f"{number:05d}")


@pytest.mark.many(about_s=15)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(
    max_examples=examples(16),
    phases=[Phase.explicit, Phase.generate],  # a large mix takes minutes to shrink
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mixture=mixtures)
@example(mixture=DEATHS)
@example(mixture=UNPAID)
async def test_three_books_agree_on_any_mix(world: Mixed, mixture: Mixture) -> None:
    number = next(world.used)
    tenant_of = {f"{name}-{number}": f"{TENANTS[name]}-{number}" for name in NAMES}
    shared = world.ledger
    ledger = Ledger(
        shared.redis_url,
        shared.apis,
        shared.row_lists,
        shared.until_idle,
        tenant_of,
        shared.limiters,
    )
    mix = Mix(world, number, ledger)
    note(f"{mixture}")
    await mix.run(mixture)
    await mix.settle()
    with pytest.MonkeyPatch.context() as patch:
        # Nobody waits for what workers might still say of canceled predictions: they are idle.
        patch.setattr("api.predictions.follower.ENDING_S", 0.0)
        await ledger.check(mix.spare_usd)
    check_bounds(ledger, times=2 if any(one.outage for one in mixture.waves) else 1)
