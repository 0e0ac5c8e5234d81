"""For any mix of requests, however they end, the three books agree, and no budget is exceeded.

Responses, rows and counters are compared per key and tenant (tests/api/ledger.py). An example is a
list of waves. A wave's requests are in flight together: model processes are held until the requests
that hang up, are late or are canceled have ended. After that, a process may die, budgets may
change, or the month may end. No example depends on a clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args
from urllib.parse import urlsplit

import httpx
import pytest
import redis
from hypothesis import HealthCheck, Phase, example, given, note, settings

from api.batch_runner.runner import open_runner
from api.idempotency.store import IdempotencyStore
from api.limits.counters import SLOTS_S
from api.limits.limiter import Limiter
from shared.broker.in_memory import InMemoryBroker
from shared.canary.store import CanaryStore
from shared.errors import ModelFailed, PenstockError, Unavailable
from shared.models.catalog import Catalog, Model, flow_of
from shared.models.entry import Batch, Cache, Canary, FlowEntry, Price
from shared.models.tasks import Result
from shared.models.tasks.embedding import TextInput, Truncate
from shared.settings import ApiSettings
from shared.stores.cache import COMPUTED, ENTRY_SCHEMA, cache_key
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.batches.batching import OVER as BATCH_OVER
from tests.api.batches.batching import created, jsonl, line
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, already_open, running_api, settings_for
from tests.api.ledger import EXACT_USD, PRICED, Ledger
from tests.api.mixed_budgets import TENANTS, MixedBudgets
from tests.api.mixtures import (
    BUDGETS,
    DEATHS,
    INSTANCES,
    NAMES,
    PREDICTIONS,
    RUNNER,
    UNPAID,
    Ask,
    Mixture,
    NewBudget,
    Wave,
    mixtures,
)
from tests.api.mortal import Mortal
from tests.api.moved_clock import MovedClock
from tests.api.predicting import OVER
from tests.api.row_sums import RowSums
from tests.api.test_generation_charges import LONG
from tests.faults.links import Links
from tests.flows.models import STRING, class_entry
from tests.keys import bearer, key_for, stored
from tests.limits import WAIT_LIMIT_S
from tests.tiers import QUICK_EXAMPLES, examples
from tests.workers.test_steps import spelling
from tests.workers.worker_harness import (
    LetterPool,
    LetterProcess,
    PaintProcess,
    WordProcess,
    WorkerHarness,
    running_worker,
)
from workers.jobs.canary_share import CanaryShare
from workers.models.custom.preparation import CustomPreparer
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
LETTERS = PRICED.model_copy(
    update={"price": Price(per_million_tokens_usd=250.0, cached_share=0.25)}
)
SPELLER = LONG.model_copy(update={"name": "speller"})
REVISED = LETTERS.model_copy(
    update={
        "name": "revised",
        "revision": "1",
        # The canary keeps its share, no matter how it performs here.
        "canary": Canary(
            revision="2", share=0.5, compare_share=0.5, error_ratio=0.99, p95_ratio=1e6
        ),
    }
)
CAPITALS = class_entry(
    "capitals",
    {"word": STRING},
    STRING,
    deterministic=True,
    cache={"ttl_s": 60, "scope": "tenant"},
    price={"per_item_usd": 0.002, "cached_share": 0.25},
)
TWICE = FlowEntry.model_validate(
    {
        "name": "twice",
        "input": {"words": {"type": "array", "items": STRING}},
        "steps": [
            {
                "id": name,
                "model": CAPITALS.name,
                "for_each": each,
                "max_items": 7,
                "input": {"word": "$item"},
            }
            for name, each in (("first", "$input.words"), ("second", "$first"))
        ],
        "output": {"words": "$second"},
    }
)
"""The first step or another run has computed most of the second step's items."""
MODELS = (LETTERS, PAINTER, SPELLER, REVISED, CAPITALS)
CATALOG = Catalog(MODELS, (flow_of(TWICE, Catalog(MODELS)),))
CANARY = CATALOG.canaries[REVISED.name]
PROCESSES = ("api-0", "api-1", "batches")
BEFORE_TURN_S, AFTER_TURN_S = 5.0, 1.0
LATE_MS = "40"
PATIENT = "wait=2"
"""`Prefer` header for predictions. A late prediction waits in vain as long as its model is held."""
NEVER_S = 1e9
LEASE_S = 1.0
"""How long a dead process keeps its lease on its work."""
LINES_WAIT_S = 2.0
"""How long a batch's lines may wait for room in their budget after all other requests finish."""
RIVALS = 8
"""Deletions sent together with a cancel. They arrive at different stages of the cancel."""
ENDLESS = 10**6
"""More tokens than any test waits for."""
SMALL = {"size": "64x64", "num_inference_steps": 4}
Asked: TypeAlias = tuple[Ask, str, asyncio.Task[None]]
"""A request, its ID, and the task that sends it."""


@dataclass(repr=False)
class Mixed:
    """API instances, each with its own connection to Redis, a batch runner, and workers."""

    links: Links
    settings: ApiSettings
    clock: MovedClock
    canary: WorkerHarness
    revised: WorkerHarness
    letters: WorkerHarness
    painter: WorkerHarness
    speller: WorkerHarness
    capitals: WorkerHarness
    folder: Path
    ledger: Ledger
    canary_store: CanaryStore
    processes: list[Mortal[Any]] = field(default_factory=list)
    used: itertools.count[int] = field(default_factory=itertools.count)

    def __repr__(self) -> str:
        return "world"

    @property
    def workers(self) -> list[WorkerHarness]:
        """The canary's worker comes first, because it leaves anything it can't do to the other
        revision.
        """
        return [*self.held, self.speller]

    @property
    def held(self) -> list[WorkerHarness]:
        return [self.canary, self.revised, self.letters, self.painter, self.capitals]

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
        """Adds a started process to the ledger."""
        process = self.processes[number].process
        if number == RUNNER:
            self.ledger.limiters[:] = [process]
        else:
            self.ledger.apis[number : number + 1] = [process]

    def limiter(self, number: int) -> Limiter:
        if number == RUNNER:
            return self.ledger.limiters[0]
        return self.ledger.apis[number].dependencies.limiter


class UnlikeProcess(LetterProcess):
    """The canary's process: it can't process one of the texts that the other revision can."""

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
    for name, seconds in (("runner.POLL_S", 0.05), ("runner.ELSEWHERE_S", 0.05)):
        monkeypatch.setattr(f"api.batch_runner.{name}", seconds)
    monkeypatch.setattr("api.batch_runner.terms.REFRESH_S", 0.0)
    monkeypatch.setattr("api.limits.budget_marks.POLL_S", 0.02)
    monkeypatch.setattr("api.limits.budget_marks.PASS_S", NEVER_S)
    monkeypatch.setattr("api.limits.budget_marks.CHECKS_AFTER_S", (0.01,) * 10_000)
    monkeypatch.setattr("api.limits.budget_marks.SETTLE_S", 0.0)
    monkeypatch.setitem(IdempotencyStore.__init__.__kwdefaults__ or {}, "lease_s", LEASE_S)
    port = urlsplit(redis_url).port
    assert port is not None
    keys = MixedBudgets(tmp_path, 0).write()
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys)
    async with AsyncExitStack() as opened:
        links = opened.enter_context(Links(dict.fromkeys(PROCESSES, port)))
        broker = InMemoryBroker()
        canary_store = await opened.enter_async_context(CanaryStore(redis_url))
        workers: dict[str, Any] = await _workers(opened, redis_url, tmp_path, broker, canary_store)
        ledger = Ledger(redis_url, [], [one.rows for one in workers.values()], _nothing)
        world = Mixed(
            links,
            settings,
            clock=clock,
            canary_store=canary_store,
            folder=tmp_path,
            ledger=ledger,
            **workers,
        )
        ledger.until_idle = world.until_workers_idle
        for name in PROCESSES:
            url = f"redis://127.0.0.1:{links.port(name)}/0"
            own = settings.model_copy(update={"redis_url": url})
            spent = RowSums(ledger.row_lists)
            made = partial(_runner, own) if name == PROCESSES[RUNNER] else partial(_api, own, spent)
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
    """Starts a worker for each model."""

    def running(model: Model, **given: Any) -> AbstractAsyncContextManager[WorkerHarness]:
        return running_worker(redis_url, folder, model=model, broker=broker, **given)

    def part(model: Model) -> CanaryShare:
        return CanaryShare(model, CANARY, canary_store, broker, refresh_s=0.05)

    pools = [LetterPool(one()) for one in (UnlikeProcess, PaintProcess, WordProcess)]
    preparer = WORKER_TASKS["image"].preparer(PAINTER, Path())
    made = {
        "canary": running(CANARY, pool=pools[0], canary=part(CANARY)),
        "revised": running(REVISED, canary=part(REVISED)),
        "letters": running(LETTERS),
        "painter": running(PAINTER, pool=pools[1], preparer=preparer),
        "speller": spelling(redis_url, folder, model=SPELLER, broker=broker),
        "capitals": running(
            CAPITALS, pool=pools[2], preparer=CustomPreparer(CAPITALS), catalog=CATALOG
        ),
    }
    return {name: await opened.enter_async_context(one) for name, one in made.items()}


async def _nothing() -> None:
    return None


@asynccontextmanager
async def _api(
    settings: ApiSettings, spent: RowSums, door: Any, rows: list[Row]
) -> AsyncIterator[ApiUnderTest]:
    parts: dict[str, Any] = {"worker": FakeWorker(door, ()), "written": rows, "spent": spent}
    async with running_api(settings, door, door, CATALOG, **parts) as api:
        yield api


@asynccontextmanager
async def _runner(settings: ApiSettings, door: Any, rows: list[Row]) -> AsyncIterator[Limiter]:
    parts = (already_open(door), already_open(door), RowList(rows))
    async with open_runner(settings, CATALOG, *parts, lease_s=LEASE_S) as runner:
        running = asyncio.create_task(runner.run())
        try:
            yield runner._tools.executor.limiter
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@dataclass(repr=False)
class Mix:
    """An example: its own tenants, its requests, and the costs reported in its responses."""

    world: Mixed
    budgets: MixedBudgets
    ledger: Ledger
    fresh: itertools.count[int] = field(default_factory=itertools.count)
    noted: dict[tuple[str, str], float] = field(default_factory=dict)
    """Predictions' costs before they were deleted, keyed by id and creation time.

    A caller's own id may be reused after the deletion.
    """
    untold: set[str] = field(default_factory=set)
    """Predictions that were deleted before their cost could be read."""
    own_ids: dict[str, str] = field(default_factory=dict)
    """Ids that callers chose for predictions, keyed by the id of the request that created them."""
    silent: set[str] = field(default_factory=set)
    """Requests whose cost was never reported to their callers, keyed by the id they sent.

    Either the response was stored although the caller hung up, or the process died.
    """
    answered: set[str] = field(default_factory=set)
    """Requests whose cost was reported to their callers, keyed by the id they sent."""
    spare_usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Amounts that processes could have returned if they hadn't died, keyed by counter name."""
    has_died: bool = False
    """True if a process has died."""

    def key(self, name: str) -> str:
        return self.budgets.key(name)

    async def run(self, mixture: Mixture) -> None:
        self.world.let_go()
        await self.world.canary_store.resume(CANARY)
        if mixture.turn is None:
            self.world.clock.move(0)
        else:
            self.world.clock.move_to_turn(BEFORE_TURN_S)
        self.budgets.write()
        await self._know_budgets()
        batches = [(one, await self._batch(one)) for one in mixture.batches]
        for number, wave in enumerate(mixture.waves):
            await self._wave(wave, turns=number == mixture.turn)
        for one, batch in batches:
            await self._end_batch(one, batch)

    async def _wave(self, wave: Wave, *, turns: bool) -> None:
        async with self._fixed_marks() if wave.outage else nullcontext():
            self.world.hold()
            if wave.outage:
                self.world.lose_redis(wave.outage)
            asked = await self._begin(wave)
            if wave.dies is not None:
                await self._kill(wave.dies, asked)
            if wave.budgets:
                await self._change_budgets(wave.budgets)
            if turns:
                self.world.clock.move_to_turn(-AFTER_TURN_S)
            self.world.letters.process.deaths = int(wave.model_dies)
            self.world.let_go()
            if wave.outage:
                self.world.heal()
            await asyncio.gather(*(task for _, _, task in asked if not task.cancelled()))
            if wave.outage:
                await self._tell_redis()
        if wave.budgets:
            await self._know_budgets()

    async def _begin(self, wave: Wave) -> list[Asked]:
        """Sends a wave's requests, and waits for the requests that end early."""
        names = [f"{self.budgets.number}-{one.key}-{next(self.fresh)}" for one in wave.asks]
        asked = [
            (one, name, asyncio.create_task(self._ask(one, name)))
            for one, name in zip(wave.asks, names, strict=True)
        ]
        if ending := [task for one, _, task in asked if one.ends_early]:
            await asyncio.wait(ending)
        return asked

    async def _tell_redis(self, numbers: Iterable[int] = range(len(PROCESSES))) -> None:
        """Makes processes report to Redis everything they did while Redis was unreachable."""
        for limiter in map(self.world.limiter, numbers):
            async with asyncio.timeout(WAIT_LIMIT_S):
                is_told = False
                while not is_told:
                    with suppress(Unavailable):
                        await limiter.store.wait_up(WAIT_LIMIT_S)
                        await limiter.give_back(limiter._clock())
                        is_told = True

    async def _change_budgets(self, new: Sequence[NewBudget]) -> None:
        """Changes budgets and refreshes them on the first instance."""
        for one in new:
            self.budgets.change(one)
        await self.ledger.apis[0].dependencies.access.refresh()

    async def _know_budgets(self) -> None:
        """Waits until all instances have the budgets and Redis has marks for them."""
        for api in self.ledger.apis:
            await api.dependencies.access.refresh()
        store, marked = self.ledger.apis[0].dependencies.limiter.store, set[str]()
        async with asyncio.timeout(WAIT_LIMIT_S):
            while marked != self.budgets.counted():
                await asyncio.sleep(0.01)
                with suppress(Unavailable):
                    marked = set(await store.marks())

    async def _kill(self, number: int, asked: Sequence[Asked]) -> None:
        """Kills a process once it has reported to Redis the work it did during an outage."""
        limiter = self.world.limiter(number)
        await self._tell_redis([number])
        waiting = [one for one in asked if one[0].instance == number and not one[2].done()]
        # The lock on the marks would outlive an instance by minutes. The runner never holds it.
        async with nullcontext() if number == RUNNER else self._fixed_marks():
            await self.world.processes[number].die([task for _, _, task in waiting])
        self.has_died = True
        self.silent |= {name for one, name, _ in waiting if one.kind not in PREDICTIONS}
        self.silent -= self.answered  # in the meantime
        for name, usd in (await self.ledger.held_usd(limiter.store._instance)).items():
            self.spare_usd[name] += usd
        self.world.place(number)

    @asynccontextmanager
    async def _fixed_marks(self) -> AsyncIterator[None]:
        """A block in which no instance moves a budget's mark.

        Amounts an instance spends without Redis while a mark moves count twice
        (docs/decisions/0124-budgets-from-their-rows.md).
        """
        store = self.ledger.limiters[0].store
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not await store.lock_marks():  # noqa: ASYNC110 - Redis has no event for it
                await asyncio.sleep(0.01)
        yield
        await store.unlock_marks()

    def _body(self, one: Ask) -> tuple[str, dict[str, Any]]:
        """Returns the path and the body. A request that must never complete gets a unique item."""
        own = one.ends_early
        number = next(self.fresh) if own and not one.repeats else 0
        texts = [_text(item) for item in one.items] + ([_own(number)] if own else [])
        first = one.items[0]
        if one.kind in ("texts", "revised"):
            model = LETTERS if one.kind == "texts" else REVISED
            body = {"model": model.name, "input": texts, "encoding_format": "base64"}
            return "/v1/embeddings", body
        seed = 100 + number if own else first
        if one.kind == "image":
            prompt = "!" if first == 8 else "a circle"
            asked = {"model": PAINTER.name, "prompt": prompt, "seed": seed}
            return "/v1/images/generations", {**asked, **SMALL}
        if one.kind == "prediction":
            return "/v1/predictions", {"version": LETTERS.name, "input": {"text": texts[-1]}}
        if one.kind == "flow":
            return "/v1/predictions", {"version": TWICE.name, "input": {"words": texts}}
        if one.kind == "drawing":
            drawn: dict[str, Any] = {"prompt": "a circle", "seed": seed, "width": 64, "height": 64}
            return "/v1/predictions", {"version": PAINTER.name, "input": drawn}
        tokens = ENDLESS if own else 3
        # A text whose step fails is then generated on its own; otherwise, it would wait for the
        # endless texts.
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
        if one.waits and one.kind in ("prediction", "drawing", "flow"):
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
            if one.repeats and one.kind not in PREDICTIONS and mine not in self.answered:
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
        assert answer.status_code != 500 or "model_failed" in answer.text, answer.text
        if one.kind not in PREDICTIONS:
            self.answered.add(headers["x-request-id"])
            self.ledger.tell(self.key(one.key), float(answer.headers.get("x-penstock-cost-usd", 0)))
        elif one.kind != "stream" and answer.is_success:
            await self._end_prediction(one, http, answer.json()["id"])

    async def _end_prediction(self, one: Ask, http: httpx.AsyncClient, made: str) -> None:
        key = bearer(self.key(one.key))
        if one.end == "cancel beside delete":
            self.untold.add(made)
            # A process is only killed once no request without `waits` uses it.
            other = one.instance if one.waits else INSTANCES - 1 - one.instance
            await _cancel_beside_delete(http, self.ledger.apis[other].http, made, key)
        elif one.end.startswith("cancel"):
            await http.post(f"/v1/predictions/{made}/cancel", headers=key)
        elif one.end == "delete":
            found = await self._over(http, made, key)
            if "created_at" in found:  # otherwise another request has deleted it
                self.noted[made, found["created_at"]] = cost_of(found)
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

    async def _batch(self, one: Ask) -> str:
        """Creates a batch. Returns its ID."""
        client = self.ledger.apis[0].openai(api_key=key_for(self.key(one.key)))
        given = {"model": LETTERS.name, "encoding_format": "base64"}
        lines = [line(str(at), **given, input=[_text(item)]) for at, item in enumerate(one.items)]
        batch: str = (await created(client, jsonl(lines))).id
        if one.end == "cancel":
            await client.batches.cancel(batch)
        return batch

    async def _end_batch(self, one: Ask, batch: str) -> None:
        """Waits for a batch to finish.

        Cancels it if its lines are waiting for room in a full budget.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LINES_WAIT_S):
                return await self._until_over(one, batch)
        await self._until_over(one, batch, cancels=True)

    async def _until_over(self, one: Ask, batch: str, *, cancels: bool = False) -> None:
        http, key = self.ledger.apis[0].http, bearer(self.key(one.key))
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                if cancels:
                    await http.post(f"/v1/batches/{batch}/cancel", headers=key)
                answer = await http.get(f"/v1/batches/{batch}", headers=key)
                if answer.json().get("status") in BATCH_OVER:
                    return
                await asyncio.sleep(0.02)

    async def settle(self) -> None:
        """Ends requests that no caller is waiting for anymore, and records predictions' costs."""
        for name in NAMES:
            for one in await self._listed(name):
                if one["status"] not in OVER:
                    await self._answered("POST", f"/v1/predictions/{one['id']}/cancel", name)
        for api in self.ledger.apis:
            await api.until_idle()
        await self.ledger.until_idle()
        costs_usd = dict(self.noted)
        for name in NAMES:
            http, key = self.ledger.apis[0].http, bearer(self.key(name))
            for one in await self._listed(name):
                found = await self._over(http, one["id"], key)
                costs_usd[one["id"], one["created_at"]] = cost_of(found)
        await self.ledger.until_idle()
        said = defaultdict[str, float](float)
        for (made, _), cost_usd in costs_usd.items():
            said[made] += cost_usd
        self._tell(said)
        await self._tell_redis()
        if self.has_died:  # after this time, its reserved amounts count as spent
            self.world.clock.move_on(SLOTS_S + 1)
        self.ledger.uncounted = self.budgets.budgets().keys() - self.budgets.counted()

    def _tell(self, said: defaultdict[str, float]) -> None:
        """Reports predictions' costs to the ledger. Rows identify the keys they belong to.

        For responses stored after their callers hung up, and for batch lines, no caller gets a
        report of the cost.
        """
        keys = {stored(key, tenant).id: key for key, tenant in self.ledger.tenant_of.items()}
        for row in self.ledger.rows():
            key = keys.get(row.key_id or "")
            if key is None or row.status == "refused":
                continue  # it created nothing, even though the ID that it requested may exist
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
        """Repeats a request while Redis is still unreachable."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                http, key = self.ledger.apis[0].http, bearer(self.key(name))
                answer = await http.request(method, path, headers=key)
                if answer.status_code != 503:
                    assert answer.is_success, answer.text
                    found: dict[str, Any] = answer.json()
                    return found
                await asyncio.sleep(0.01)


async def _cancel_beside_delete(
    http: httpx.AsyncClient, other: httpx.AsyncClient, made: str, key: Mapping[str, str]
) -> None:
    """Cancels a prediction while it is deleted several times; one of the deletions may succeed."""
    url = f"/v1/predictions/{made}"
    canceling = http.post(f"{url}/cancel", headers=key)
    deleting = [other.delete(url, headers=key) for _ in range(RIVALS)]
    _, *deleted = await asyncio.gather(canceling, *deleting)
    if all(one.status_code == 409 for one in deleted):  # the cancel came last
        await other.delete(url, headers=key)


def check_bounds(ledger: Ledger, highest_usd: Mapping[str, float], times: int) -> None:
    """No budget is exceeded.

    Without Redis, each instance spends its share of the last remaining amount it knows of.

    An instance that doesn't know how much has been spent uses its share of the total budget, so
    together the instances overspend by at most one budget (docs/reference/limits.md).
    """
    for name, months in ledger.charged_by_month().items():
        for month, usd in months.items():
            most_usd = times * highest_usd[name]
            assert usd <= most_usd + EXACT_USD, f"{name} spent {usd} of {most_usd} in {month}"


def check_paid_once(
    ledger: Ledger, texts: Sequence[str], words: Sequence[str], *, is_whole: bool
) -> None:
    """Each text or word that was computed and delivered is paid for in full, exactly once.

    Rows do not contain the texts, but each text has a different length. A process that finds a
    result before it is marked as unpaid pays only a share of it. In that case the mark still exists
    for the next request (docs/decisions/0131-unpaid-results.md).

    Args:
        ledger: the ledger that contains the example's books.
        texts: texts sent to the embedding model.
        words: words sent to flow steps.
        is_whole: True if no process died and every process could reach the Redis that has the
            marks.
    """
    tenants = set(ledger.tenant_of.values())
    paid = [row for row in ledger.rows() if row.tenant in tenants and row.cost_usd]
    in_full = [row for row in paid if row.cache == COMPUTED]
    of_words = sum(row.model == CAPITALS.name for row in in_full)
    assert of_words <= len(words), f"{len(words)} words computed, {of_words} paid in full"
    lengths = [row.tokens for row in in_full if row.model == LETTERS.name]
    too_many = Counter(lengths) - Counter(map(len, texts))
    assert not too_many, f"paid in full more often than computed, by length: {too_many}"
    if is_whole:
        free = {(row.tenant, row.tokens) for row in paid if row.model == LETTERS.name}
        free -= {(row.tenant, row.tokens) for row in in_full if row.model == LETTERS.name}
        free -= unpaid_texts(ledger.redis_url, tenants)
        assert not free, f"delivered, and nobody has to pay in full: {free}"


def unpaid_texts(redis_url: str, tenants: Iterable[str]) -> set[tuple[str, int | None]]:
    """Returns the texts whose next hit pays in full, by tenant and length."""
    texts = [_text(item) for item in range(7)]
    with redis.Redis.from_url(redis_url) as client:
        return {
            (tenant, len(text))
            for tenant, text, way in itertools.product(tenants, texts, get_args(Truncate))
            if client.exists(
                f"penstock:unpaid:{ENTRY_SCHEMA}:"
                + cache_key(LETTERS, TextInput(text, way), tenant)
            )
        }


def cost_of(prediction: Mapping[str, Any]) -> float:
    return float((prediction.get("metrics") or {}).get("cost_usd") or 0)


def _text(item: int) -> str:
    """A text whose length differs from all others that can be delivered."""
    return "0!"[item - 7] if item >= 7 else "abcdefg"[item] * 4 * (item + 1)


def _own(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:032d}")


@pytest.mark.many(about_s=80)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(
    max_examples=examples(100) if settings().max_examples > QUICK_EXAMPLES else 1,
    phases=[Phase.explicit, Phase.generate],  # a large mix takes minutes to shrink
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mixture=mixtures)
@example(mixture=DEATHS)
@example(mixture=UNPAID)
@example(mixture=BUDGETS)
async def test_three_books_agree_on_any_mix(world: Mixed, mixture: Mixture) -> None:
    budgets = MixedBudgets(world.folder, next(world.used))
    shared, letters, capitals = world.ledger, world.letters.process, world.capitals.process
    ledger = Ledger(
        shared.redis_url,
        shared.apis,
        shared.row_lists,
        shared.until_idle,
        budgets.tenant_of,
        shared.limiters,
    )
    mix, before = Mix(world, budgets, ledger), (len(letters.batches), len(capitals.batches))
    note(f"{mixture}")
    await mix.run(mixture)
    await mix.settle()
    with pytest.MonkeyPatch.context() as patch:
        # Doesn't wait for workers to report on canceled predictions, because the workers are idle.
        patch.setattr("api.predictions.follower.ENDING_S", 0.0)
        # Budgets are compared with their rows until they agree.
        patch.setattr("api.limits.budget_marks.PASS_S", 0.0)
        await ledger.check(mix.spare_usd)
    has_outage = any(one.outage for one in mixture.waves)
    check_bounds(ledger, budgets.highest_usd, times=2 if has_outage else 1)
    texts, words = (
        list(itertools.chain.from_iterable(process.batches[number:]))
        for process, number in zip((letters, capitals), before, strict=True)
    )
    check_paid_once(ledger, texts, words, is_whole=not (has_outage or mix.has_died))
