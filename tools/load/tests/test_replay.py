"""A replay sends every request that is due, and the ledger records it, whatever its outcome."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock_load import replay
from penstock_load.inputs import REQUEST_FORMS
from penstock_load.ledger import Ledger, LedgerHead, open_ledger, read_ledger
from penstock_load.plan import LoadPlan
from penstock_load.replay import Pace, Replay
from penstock_load.session import replay as run_replay
from penstock_load.tally import ReplayProgress, Tally
from penstock_load.target import Target
from penstock_load.trace import Arrival
from shared.errors import Unavailable
from tests.keys import key_for
from tests.limits import WAIT_LIMIT_S
from tools.load.tests.api_of_load import FOREIGN, answer_texts, serving

ROOT = Path(__file__).parents[3]
RUN = "load-1"


def no_show(look: ReplayProgress, tally: Tally) -> None:
    pass


async def replayed(
    path: Path, target: Target, arrivals: Sequence[Arrival], **pace: Any
) -> tuple[Ledger, Tally]:
    forms = {
        "mini": REQUEST_FORMS["embedding"],
        "tiny": REQUEST_FORMS["image"],
        "spell": REQUEST_FORMS["custom"],
    }
    with open_ledger(path, LedgerHead(RUN, target.url, 0.0)) as ledger:
        replay = Replay(
            target,
            RUN,
            arrivals,
            forms,
            Pace(**pace),
            seed=3,
            ledger=ledger,
            show=no_show,
        )
        await replay.run()
    return read_ledger(path), replay.tally


def text(at_s: float, **fields: Any) -> Arrival:
    return Arrival(at_s, model="mini", **fields)


@pytest.mark.anyio
async def test_ledger_has_what_each_answer_said(tmp_path: Path) -> None:
    async with serving() as api:
        keys = {"acme": key_for("a"), "zenith": key_for("z")}
        arrivals = [text(0, tenant="acme"), text(0, tenant="zenith", items=2)]
        ledger, tally = await replayed(
            tmp_path / "ledger", Target(api.url, keys=keys), arrivals, speed=1.0
        )
    first, second = sorted(ledger.lines, key=lambda line: line.id)
    assert (first.id, first.tenant, first.status) == ("load-1-0000000", "acme", 200)
    assert (first.tokens, first.cost_usd, first.cache) == (7, 0.00000007, "miss")
    assert first.key_id
    assert first.key_id in key_for("a")
    assert first.sent_at_s <= first.ended_at_s
    assert (second.tenant, second.items) == ("zenith", 2)
    sent = {headers["x-request-id"]: (headers, body) for _, headers, body in api.requests}
    headers, body = sent["load-1-0000001"]
    assert headers["authorization"] == f"Bearer {key_for('z')}"
    assert len(set(body["input"])) == 2
    assert (tally.ended, tally.by_outcome["200"], tally.tokens) == (2, 2, 14)


STARTED = {"id": "p1", "status": "processing", "metrics": {}}
ENDED = {
    "id": "p1",
    "status": "succeeded",
    "metrics": {
        "cost_usd": 0.75,
        "steps": [
            {"id": "words", "model": "split", "items": 1, "failed": 0, "cost_usd": 0.25},
            {"id": "check", "model": "check", "items": 3, "failed": 1, "cost_usd": 0.5},
        ],
    },
}


async def answer_runs(body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(STARTED, status=201)


@pytest.mark.anyio
async def test_a_run_of_a_flow_is_read_until_its_end(tmp_path: Path) -> None:
    async with serving(answer_runs) as api:
        api.reads = [STARTED, ENDED]
        arrival = Arrival(0, model="spell", input='{"text": "a b c"}', deadline_s=9)
        ledger, tally = await replayed(tmp_path / "ledger", Target(api.url), [arrival])
    ((path, headers, body),) = api.requests
    assert (path, body) == ("/v1/predictions", {"version": "spell", "input": {"text": "a b c"}})
    assert (headers["prefer"], headers["x-penstock-deadline-ms"]) == ("wait", "9000")
    assert [read["x-request-id"] for read in api.read_headers] == [headers["x-request-id"]] * 2
    (line,) = ledger.lines
    assert (line.status, line.ending, line.items, line.cost_usd) == (200, "answered", 4, 0.75)
    assert line.steps == {"words": (1, 0), "check": (3, 1)}
    assert (tally.ended, tally.cost_usd) == (1, 0.75)


@pytest.mark.anyio
async def test_a_run_that_fails_has_its_error_and_price(tmp_path: Path) -> None:
    async with serving(answer_runs) as api:
        api.reads = [{"id": "p1", "status": "failed", "metrics": {"cost_usd": 0.25}}]
        arrival = Arrival(0, model="spell", input="{}")
        ledger, _ = await replayed(tmp_path / "ledger", Target(api.url), [arrival])
    (line,) = ledger.lines
    assert (line.status, line.code, line.cost_usd) == (500, "failed", 0.25)


WAITS_S = (0.2, 1.0, 5.0, 20.0)
"""On a busy machine, the first ones may end before the run exists."""


@pytest.mark.anyio
@pytest.mark.parametrize("ending", ["canceled", "unanswered"])
async def test_a_run_that_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """The trace hangs up between two polls, or the replay waits no longer."""
    monkeypatch.setattr(replay, "POLL_S", 0.01)
    async with serving(answer_runs) as api:
        api.reads = [STARTED]
        for wait_s in WAITS_S:
            arrival = Arrival(0, model="spell", input="{}")
            if ending == "canceled":
                arrival = msgspec.structs.replace(arrival, cancel_after_s=wait_s)
            else:
                monkeypatch.setattr(replay, "ANSWER_LIMIT_S", wait_s)
            ledger, _ = await replayed(tmp_path / str(wait_s), Target(api.url), [arrival])
            (line,) = ledger.lines
            assert (line.status, line.ending) == (0, ending)
            if api.read_headers:
                return
    pytest.fail("the run was never polled")


@pytest.mark.anyio
async def test_groups_send_the_same_and_others_do_not(tmp_path: Path) -> None:
    arrivals = [
        text(0, group="a", size=20),
        text(0, group="a", size=20),
        text(0, group="b", size=20),
        text(0),
        text(0),
        text(0, input="as given"),
        Arrival(0, model="tiny", group="a", size=5),
        Arrival(0, model="tiny", group="a", size=5),
        Arrival(0, model="tiny", group="b", items=2),
    ]
    async with serving() as api:
        await replayed(tmp_path / "ledger", Target(api.url), arrivals)
    bodies = {headers["x-request-id"]: body for _, headers, body in api.requests}
    sent = [bodies[f"load-1-{number:07}"] for number in range(len(arrivals))]
    assert sent[0] == sent[1]
    assert len(sent[0]["input"].split()) == 20
    assert len({body["input"] for body in sent[:6]}) == 5
    assert sent[5]["input"] == "as given"
    assert sent[6] == sent[7]
    assert sent[6]["seed"] != sent[8]["seed"]
    assert (sent[6]["num_inference_steps"], sent[8]["n"]) == (5, 2)
    assert {path for path, _, _ in api.requests} == {"/v1/embeddings", "/v1/images/generations"}


@pytest.mark.anyio
async def test_options_of_an_arrival_become_headers(tmp_path: Path) -> None:
    async with serving() as api:
        await replayed(
            tmp_path / "ledger",
            Target(api.url),
            [text(0, deadline_s=2.5, priority="batch"), text(0)],
        )
    (_, special, _), (_, usual, _) = sorted(api.requests, key=lambda one: one[1]["x-request-id"])
    assert special["x-penstock-deadline-ms"] == "2500"
    assert special["x-penstock-lane"] == "batch"
    assert not {"x-penstock-deadline-ms", "x-penstock-lane", "authorization"} & usual.keys()


@pytest.mark.anyio
async def test_what_is_due_beyond_the_bound_is_counted_and_not_sent(tmp_path: Path) -> None:
    all_due = asyncio.Event()

    async def answer_late(body: dict[str, Any]) -> web.StreamResponse:
        await all_due.wait()
        return await answer_texts(body)

    async with serving(answer_late) as api:
        arrivals = [text(0) for _ in range(10)]
        loop = asyncio.get_running_loop()
        running = loop.create_task(
            replayed(tmp_path / "ledger", Target(api.url), arrivals, most_in_flight=3)
        )
        while len(api.requests) < 3:
            await api.seen.wait()
            api.seen.clear()
        all_due.set()
        ledger, tally = await running
    assert (tally.due, tally.not_sent, tally.ended) == (10, 7, 3)
    assert [line.status for line in ledger.lines] == [200] * 3


@pytest.mark.anyio
async def test_endings_without_an_answer_are_told_apart(tmp_path: Path) -> None:
    async def misbehave(body: dict[str, Any]) -> web.StreamResponse:
        if body["input"] == "refuse":
            return web.json_response({"error": {"code": "overloaded"}}, status=429)
        if body["input"] == "gateway":
            return web.Response(text="<html>", status=502, headers={FOREIGN: "1"})
        if body["input"] == "noise":
            noise = b'{"error": {"code": "\xff"}}'
            return web.Response(body=noise, status=500, content_type="application/json")
        await asyncio.Event().wait()
        raise AssertionError

    arrivals = [
        text(0, input="refuse"),
        text(0, input="gateway"),
        text(0, input="hang up", cancel_after_s=0.01),
        text(0, input="noise"),
    ]
    async with asyncio.timeout(WAIT_LIMIT_S), serving(misbehave) as api:
        ledger, tally = await replayed(tmp_path / "ledger", Target(api.url), arrivals)
    endings = {line.id[-1]: (line.ending, line.status, line.code) for line in ledger.lines}
    assert endings == {
        "0": ("answered", 429, "overloaded"),
        "1": ("foreign", 502, ""),
        "2": ("canceled", 0, ""),
        "3": ("answered", 500, ""),
    }
    assert set(tally.by_outcome) == {"429 overloaded", "502 from a proxy", "canceled", "500"}
    assert all(line.cost_usd is None for line in ledger.lines)


@pytest.mark.anyio
async def test_speed_and_duration_bound_what_is_sent(tmp_path: Path) -> None:
    # One hour of the trace takes 0.1 s; the test never waits for the hour after that.
    arrivals = [text(100 + 36 * number) for number in range(101)] + [text(1e9)]
    async with serving() as api:
        ledger, tally = await replayed(
            tmp_path / "ledger", Target(api.url), arrivals, speed=36_000.0, duration_s=30.0
        )
    assert tally.due == len(ledger.lines) == 101


@asynccontextmanager
async def commanded(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs Python with these arguments until the context ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_unreachable_target_leaves_no_ledger(tmp_path: Path) -> None:
    target = Target("http://127.0.0.1:9")
    plan = LoadPlan([text(0.0)], {"mini": REQUEST_FORMS["embedding"]})
    path = tmp_path / "ledger"
    for _ in range(2):  # the same command can be repeated
        with pytest.raises(Unavailable, match=r"^http://127\.0\.0\.1:9: "):
            run_replay(target, plan, Pace(), run=RUN, seed=3, path=path)
        assert not path.exists()


@pytest.mark.anyio
async def test_ledger_that_can_not_grow_ends_the_replay(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,model\n" + "1,mini\n" * 2000 + "1e9,mini\n")
    words = ["--trace", str(trace), "--ledger", str(tmp_path / "ledger")]
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    limited += "from infra.cli.main import main; main()"
    async with serving() as api:
        sent = ["load", "--url", api.url, "--max-in-flight", "5000", *words]
        async with commanded("-c", limited, *sent) as process:
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1].endswith("/ledger: File too large")
    assert "Traceback" not in errors.decode()


@pytest.mark.anyio
async def test_interrupted_command_keeps_a_whole_ledger(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,model\n" + "".join(f"{number},mini\n" for number in range(5)) + "1e6,\n")
    words = ["--trace", str(trace), "--speed", "1000", "--ledger", str(tmp_path / "ledger")]
    async with (
        serving() as api,
        commanded("-m", "infra.cli.main", "load", "--url", api.url, *words) as process,
    ):
        while len(api.requests) < 5:
            await api.seen.wait()
            api.seen.clear()
        process.send_signal(signal.SIGINT)
        await process.communicate()
    # A shell reports 130 in both cases. CPython exits with the signal if KeyboardInterrupt
    # propagates through an `exec`, for example while an imported module defines a dataclass.
    assert process.returncode in (130, -signal.SIGINT)
    ledger = read_ledger(tmp_path / "ledger")
    assert [line.status for line in ledger.lines] == [200] * 5
    assert ledger.head.url == api.url
