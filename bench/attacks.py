"""Attacks by a malicious tenant, each for a minute alongside a quiet one.

The quiet tenant sends its small requests (bench/bad_neighbor/quiet.py) alone, then during the
attack, then beside the same CPU load without requests (bench/bad_neighbor/cpu_load.py), because the
attacker shares the cores of this machine with the whole stack. Its p99 during the attack must be at
most RATIO times the slower of the other two, plus the attack's stated bound. No request of the
quiet tenant may be refused, no process may exceed its memory limit, and each attack has a check of
its own, for example that nothing was served that should be refused.

To add an attack, write a function that prepares it and returns what sends one request, and add an
`Attack` to ATTACKS. The attacker is a process of its own, `python -m bench.attacks ATTACK`, which
reads its order from stdin.

BENCH_ATTACK_SECONDS is how long each of the three drives takes, and BENCH_ATTACKS names the attacks
to run, separated by commas.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psutil
import yaml

from bench import wasted
from bench.bad_neighbor.comparison import percentile
from bench.bad_neighbor.cpu_load import (
    CpuDrive,
    Load,
    burning,
    cores_of,
    load_between,
    step_back,
)
from bench.bad_neighbor.inputs import BAD, EMBEDDER, PAINTER, QUIET, edit
from bench.bad_neighbor.ordered import await_start, ordered, read_order, write_report
from bench.bad_neighbor.quiet import (
    SURFACES,
    Noticed,
    Quiet,
    Surface,
    notice,
    quiet_tenant,
)
from bench.bad_neighbor.rounds import CLIENT, noticed_with_load
from bench.bad_neighbor.world import await_idle
from bench.pipeline import MODELS_FILE, say_nothing
from bench.report import Figure, Outcome
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.up import served_stack
from shared.tenants.plan import Plan
from tests.api.file_server import FileServer, serving_files
from tests.hostile_jpeg import repeat_scans
from tests.keys import bearer, keys_url, stored

SECONDS = float(os.environ.get("BENCH_ATTACK_SECONDS", "60"))
CHOSEN = os.environ.get("BENCH_ATTACKS", "")
RATIO = 2.0
WARM_UP_S, LEAD_S, REPORT_LIMIT_S = 4.0, 1.5, 120.0
MAX_REASONS = 6
AFTER_REFUSAL_S = 0.02
"""Each caller of the attacker waits so long after a refusal: it ignores Retry-After."""
MIB = 1024 * 1024
READER_FOLDER = Path(__file__).parents[1] / "examples" / "ocr"
STORAGE_MAX_BYTES = 8 * MIB
PLANS = {
    "quiet": Plan(requests_per_min=100_000, budget_usd_per_month=1e6),
    "bad": Plan(
        requests_per_min=1_000_000, budget_usd_per_month=1e6, storage_max_bytes=STORAGE_MAX_BYTES
    ),
    **wasted.PLANS,
}
ALLOWED, ELSEWHERE = "/bucket/", "/elsewhere/"
ADAPTER_MEMORY_BYTES = 256 * MIB
MEMORY_LIMIT_BYTES = {"api": 1024 * MIB, "codec": 1024 * MIB, "worker": 2048 * MIB}
"""Of resident memory: the API's container and the address space of a codec process (as shipped),
and a worker with its model processes."""
WATCH_S = 0.1
_WASTEFUL = wasted.WASTEFUL
DOCUMENTS = "documents"
"""A surface that is served only if an attack needs it, because its class has to be installed."""


async def _read_document(quiet: Quiet) -> None:
    """One page with a text layer."""
    await quiet.post("/v1/ocr", wasted.document_body(wasted.quick_document()))


_SURFACES = {
    surface.name: surface for surface in (*SURFACES, Surface(DOCUMENTS, 4.0, _read_document))
}


class AttackOrder(msgspec.Struct):
    """What an attacker's process is told.

    Attributes:
        url: of the API.
        files_url: of a server of files that the API may fetch from.
        seconds: how long the attack takes.
    """

    url: str
    files_url: str
    seconds: float


class AttackReport(msgspec.Struct):
    """What an attacker's process reports: answers by status, and the first words of refusals.

    Status 0: no answer came.
    """

    statuses: dict[int, int]
    reasons: dict[str, int]


class Attacker:
    """The malicious tenant's client."""

    def __init__(self, order: AttackOrder, http: aiohttp.ClientSession) -> None:
        self.order = order
        self.statuses: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self._http = http
        self._number = 0

    def count(self) -> int:
        """Returns another number each time."""
        self._number += 1
        return self._number

    async def post(self, path: str, body: object) -> int:
        """Sends a request and counts its answer. Returns the status, 0 without an answer."""
        status, said = 0, b""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.post(f"{self.order.url}{path}", json=body) as answer:
                said, status = await answer.read(), answer.status
        self.statuses[status] += 1
        if status >= 400:
            self.reasons[f"{status} {_message(said)}"] += 1
        return status

    async def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Sends a request that is not counted. Returns the body of its answer, or nothing."""
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            url = f"{self.order.url}{path}"
            async with self._http.request(method, url, json=body) as answer:
                return dict(json.loads(await answer.read()))
        return {}

    async def upload(self, data: bytes) -> dict[str, Any]:
        """Uploads a file of a batch. Returns the body of its answer, or nothing."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", data, filename="in.jsonl")
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.post(f"{self.order.url}/v1/files", data=form) as answer:
                return dict(json.loads(await answer.read()))
        return {}

    def url_of(self, path: str) -> str:
        """The URL of a file of the server of files."""
        return f"{self.order.files_url}{path}"


Act = Callable[[Attacker], Awaitable[int]]
"""Sends one request, and returns the status of its answer."""


class World(NamedTuple):
    """What checks look at after an attack."""

    stack: Stack
    files: FileServer
    folder: Path
    """Of the stack's state. The object store is below it."""
    seconds: float
    """How long each drive takes."""


class Attack(NamedTuple):
    """One kind of attack."""

    name: str
    surface: str
    """What the quiet tenant does meanwhile: the name of one of SURFACES."""
    prepare: Callable[[], Act]
    """Prepares what is sent, before the attack begins."""
    callers: int
    """How many act at the same time, again and again."""
    key: str = BAD
    """Whose it is: the name of a key."""
    bound_ms: float = 0.0
    """What the quiet tenant may have to wait for in addition, and why it can't be less is said at
    the attack."""
    check: Callable[[World, AttackReport], list[Figure]] = lambda world, report: []
    """Returns the figures that are this attack's own."""


# -- 22: a JPEG that takes a codec process many CPU seconds


def _send_jpeg(side: int, scans: int) -> Act:
    source = "data:image/jpeg;base64," + base64.b64encode(repeat_scans(side, scans)).decode()

    def act(attacker: Attacker) -> Awaitable[int]:
        # Less than one step, which is refused after the image was decoded: nothing is drawn.
        body = edit(source, "64x64", 1, model=PAINTER, strength=0.5)
        return attacker.post("/v1/images/edits", body)

    return act


# A hundred scans are read, so the second is the worst that is decoded.
_send_jpeg_of_many_scans = partial(_send_jpeg, 3200, 800)
_send_jpeg_within_the_limit = partial(_send_jpeg, 4992, 90)


# -- 23: an adapter from a folder that the catalog does not allow


def _use_adapter_from_elsewhere() -> Act:
    """Fetches it as an image first, which may be anywhere, then names it as an adapter."""

    async def act(attacker: Attacker) -> int:
        url = f"{attacker.order.files_url}{ELSEWHERE}{attacker.count() % FILES}.safetensors"
        await attacker.post("/v1/images/edits", edit(url, "64x64", 4, model=PAINTER))
        return await attacker.post("/v1/images/generations", _drawn_with(f"{url}#sha256={_SHA256}"))

    return act


def _drawn_with(adapter: str) -> dict[str, Any]:
    return {
        "model": PAINTER,
        "prompt": "a",
        "size": "64x64",
        "num_inference_steps": 4,
        "lora_weights": adapter,
    }


# -- 24: an adapter whose header declares more than the file has


def _use_adapter(name: str) -> Act:
    def act(attacker: Attacker) -> Awaitable[int]:
        url = f"{attacker.order.files_url}{ALLOWED}{name}.safetensors"
        return attacker.post("/v1/images/generations", _drawn_with(url))

    return act


# -- 28: files by URL that fill the object store


def _fetch_large_files() -> Act:
    def act(attacker: Attacker) -> Awaitable[int]:
        url = f"{attacker.order.files_url}{ELSEWHERE}large/{attacker.count() % LARGE_FILES}"
        return attacker.post("/v1/images/edits", edit(url, "64x64", 4, model=PAINTER))

    return act


def _stores_two_quotas_at_most(world: World, report: AttackReport) -> list[Figure]:
    """A file counts until the deadline of its request, so another quota fits after a minute."""
    inputs = (world.folder / "state" / "objects" / "inputs").rglob("*")
    stored_bytes = sum(file.stat().st_size for file in inputs if file.is_file())
    limit = 2 * STORAGE_MAX_BYTES / MIB
    return [Figure("stored of fetched files", stored_bytes / MIB, "MiB", "<=", limit)]


# -- 21, 25, 26, 27: work that nobody pays for (bench/wasted.py)


def _keeps_the_ledger(world: World, report: AttackReport) -> list[Figure]:
    return [wasted.check_ledger(world.stack.settings.redis_url, world.stack.api_url)]


def _wastes_no_tokens(world: World, report: AttackReport) -> list[Figure]:
    return [wasted.check_cuts(report.statuses, world.seconds + LEAD_S)]


def _wastes_no_requests(world: World, report: AttackReport) -> list[Figure]:
    return [wasted.check_refused(report.statuses.get(400, 0), world.seconds + LEAD_S)]


def _wastes_no_pages(world: World, report: AttackReport) -> list[Figure]:
    return [wasted.check_canceled(report.reasons, world.seconds + LEAD_S)]


def _ends_batches(world: World, report: AttackReport) -> list[Figure]:
    return [wasted.check_batches(report.reasons)]


def _serves_nothing(world: World, report: AttackReport) -> list[Figure]:
    return [Figure("requests served", report.statuses.get(200, 0), "", "<=", 0)]


ATTACKS = (
    Attack("scans", "images", _send_jpeg_of_many_scans, 8, check=_serves_nothing),
    Attack("largest image", "images", _send_jpeg_within_the_limit, 8, check=_serves_nothing),
    Attack("adapter elsewhere", "images", _use_adapter_from_elsewhere, 4, check=_serves_nothing),
    Attack("text as shape", "images", partial(_use_adapter, "text"), 4, check=_serves_nothing),
    Attack("long shape", "images", partial(_use_adapter, "long"), 4, check=_serves_nothing),
    Attack("fetched files", "images", _fetch_large_files, 4, check=_stores_two_quotas_at_most),
    Attack("races", "texts", wasted.race_runs, 4, wasted.RACER, check=_keeps_the_ledger),
    Attack("documents", "documents", wasted.read_slow_documents, 4),
    Attack("cuts", "texts", wasted.cut_for_nothing, 4, _WASTEFUL, check=_wastes_no_tokens),
    Attack("fetches", "images", wasted.fetch_for_nothing, 8, _WASTEFUL, check=_wastes_no_requests),
    Attack("decodes", "images", wasted.decode_for_nothing, 8, _WASTEFUL, check=_wastes_no_requests),
    Attack(
        "canceled documents",
        "documents",
        wasted.cancel_running_documents,
        4,
        _WASTEFUL,
        check=_wastes_no_pages,
    ),
    Attack("lines", "batches", wasted.line_beyond_the_budget, 4, wasted.POOR, check=_ends_batches),
)


def run() -> Outcome:
    """Runs each attack: three minutes for each, and the start of a stack for all of them."""
    names = CHOSEN.split(",") if CHOSEN else [attack.name for attack in ATTACKS]
    chosen = [attack for attack in ATTACKS if attack.name in names]
    with tempfile.TemporaryDirectory(prefix="penstock-attacks-") as name:
        figures, details = asyncio.run(measure(Path(name), chosen, SECONDS))
    refused = sum(one["quiet_refused"] for one in details)
    failure = f"{refused} requests of the quiet tenant were refused" if refused else ""
    return Outcome(figures, {"attacks": details, "seconds": SECONDS}, failure)


async def measure(
    folder: Path, attacks: Sequence[Attack], seconds: float
) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Runs attacks on one stack, one after the other.

    Args:
        folder: for the state of the stack.
        seconds: how long each of the three drives of an attack takes.

    Returns:
        Their figures, and what explains them.
    """
    figures: list[Figure] = []
    details: list[dict[str, Any]] = []
    async with serving_files(folder) as files:
        _fill(files)
        serving = _serving(folder, files, attacks)
        stack = await asyncio.to_thread(serving.__enter__)
        try:
            async with quiet_tenant(stack.api_url) as quiet:
                world = World(stack, files, folder, seconds)
                for attack in attacks:
                    line = await _alongside(world, quiet, attack)
                    figures += line.figures
                    details.append(line.details)
                    shown = {one.name: round(one.value, 3) for one in line.figures}
                    print(f"  {shown}\n  {line.details}", flush=True)
        finally:
            await asyncio.to_thread(serving.__exit__, None, None, None)
    return figures, details


class _Line(NamedTuple):
    figures: list[Figure]
    details: dict[str, Any]


async def _alongside(world: World, quiet: Quiet, attack: Attack) -> _Line:
    """Measures the quiet tenant alone, during the attack, and beside the same CPU load."""
    stack, surface, seconds = world.stack, _SURFACES[attack.surface], world.seconds
    await notice(quiet, [surface], WARM_UP_S)
    order = AttackOrder(stack.api_url, world.files.url, seconds + LEAD_S)
    leaders = {name: process.pid for name, process in stack.processes.items()}
    async with ordered(["bench.attacks", attack.name], order, REPORT_LIMIT_S) as attacker:
        leaders[CLIENT] = attacker.pid
        await asyncio.to_thread(await_idle, stack)
        alone, alone_drive = await _noticed(quiet, surface, leaders, seconds)
        async with _peak_memory(stack) as peaks:
            attacker.begin()
            await asyncio.sleep(LEAD_S)
            during, attack_drive = await _noticed(quiet, surface, leaders, seconds)
            report = await attacker.report(AttackReport, seconds + REPORT_LIMIT_S)
    load = load_between(alone_drive, attack_drive)
    await asyncio.to_thread(await_idle, stack)
    same_cpu = await _beside_load(quiet, surface, load, seconds)
    limits = _limits_of(attack, alone, during, same_cpu, peaks)
    answers = sum(report.statuses.values())
    own = [Figure("answers to the attacker", answers, "", ">=", 1), *attack.check(world, report)]
    figures = [
        msgspec.structs.replace(one, name=f"{attack.name}: {one.name}") for one in limits + own
    ]
    details = {
        "attack": attack.name,
        "statuses": report.statuses,
        "reasons": report.reasons,
        "quiet_refused": during.refused.total(),
        "quiet_refusals": dict(during.refused),
        "cores": round(cores_of(load), 2),
        "load": round(os.getloadavg()[0], 2),
    }
    return _Line(figures, details)


def _limits_of(
    attack: Attack, alone: Noticed, during: Noticed, same_cpu: Noticed, peaks: dict[str, int]
) -> list[Figure]:
    slower_ms = max(percentile(alone, 99), percentile(same_cpu, 99))
    limit_ms = RATIO * slower_ms + attack.bound_ms
    return [
        Figure("quiet alone, p99", percentile(alone, 99), "ms"),
        Figure("quiet beside the same CPU load, p99", percentile(same_cpu, 99), "ms"),
        Figure("quiet during the attack, p99", percentile(during, 99), "ms", "<=", limit_ms),
        Figure("quiet refused", during.refused.total(), "", "<=", 0),
        *(
            Figure(f"peak memory, {kind}", peaks[kind] / MIB, "MiB", "<=", limit_bytes / MIB)
            for kind, limit_bytes in MEMORY_LIMIT_BYTES.items()
            if kind in peaks
        ),
    ]


async def _noticed(
    quiet: Quiet, surface: Surface, leaders: dict[str, int], seconds: float
) -> tuple[Noticed, CpuDrive]:
    noticed, drive = await noticed_with_load(quiet, [surface], seconds, leaders)
    return noticed[surface.name], drive


async def _beside_load(quiet: Quiet, surface: Surface, load: Load, seconds: float) -> Noticed:
    async with burning(load, seconds + LEAD_S, [CLIENT]):
        await asyncio.sleep(LEAD_S)
        return (await notice(quiet, [surface], seconds))[surface.name]


@asynccontextmanager
async def _peak_memory(stack: Stack) -> AsyncIterator[dict[str, int]]:
    """Watches the largest resident memory of a process of each kind while the block runs."""
    peaks: dict[str, int] = {}

    async def watch() -> None:
        while True:
            for kind, size_bytes in await asyncio.to_thread(lambda: list(_memory(stack))):
                peaks[kind] = max(peaks.get(kind, 0), size_bytes)
            await asyncio.sleep(WATCH_S)

    watching = asyncio.create_task(watch())
    try:
        yield peaks
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def _memory(stack: Stack) -> Iterator[tuple[str, int]]:
    """Yields the kind and the resident bytes of each process that has a limit."""
    for name, started in stack.processes.items():
        kind = name.partition("-")[0]
        if kind not in MEMORY_LIMIT_BYTES:
            continue
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(started.pid)
            yield kind, int(leader.memory_info().rss)
            for child in leader.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    yield "codec" if kind == "api" else kind, int(child.memory_info().rss)


FILES, LARGE_FILES = 64, 64
_FILE = bytes(range(256)) * 400
_SHA256 = hashlib.sha256(_FILE).hexdigest()
_LONG_SHAPE = 110_000
"""Numbers of a shape whose header has about 2 MB. Their product took 46 s."""


def _fill(files: FileServer) -> None:
    kind = "application/octet-stream"
    for number in range(FILES):
        files.add(f"{ELSEWHERE}{number}.safetensors", _FILE, kind, ETag=f'"{number}"')
    for number in range(LARGE_FILES):
        data = number.to_bytes(8, "big") + bytes(MIB - 8)
        files.add(f"{ELSEWHERE}large/{number}", data, kind, ETag='"1"')
    for name, shape in (
        ("text", ["x", 1_500_000_000]),
        ("long", [2**63] * _LONG_SHAPE),
    ):
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}
        header = json.dumps({"a": tensor}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(8)
        files.add(f"{ALLOWED}{name}.safetensors", data, kind, ETag='"1"')
    files.add(wasted.JUNK, bytes(wasted.JUNK_BYTES), "image/png")


_RACE = {
    "name": wasted.RACE,
    "input": {"text": "string"},
    "steps": [
        {"id": "vector", "model": EMBEDDER, "input": {"text": "$input.text"}},
        {"id": "image", "model": PAINTER, "input": {"prompt": "$input.text"}},
    ],
    "output": {"vector": "$vector", "image": "$image"},
}


def _reader(folder: Path) -> dict[str, Any]:
    """The entry of the class that reads documents, from a copy of its folder."""
    shipped = yaml.safe_load((READER_FOLDER / "models.yaml").read_text(encoding="utf-8"))
    (entry,) = shipped["models"]
    copied = folder / READER_FOLDER.name
    shutil.copytree(READER_FOLDER, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return {**entry, "source": f"local:{copied}"}


@contextmanager
def _serving(folder: Path, files: FileServer, attacks: Sequence[Attack]) -> Iterator[Stack]:
    """The stack that both tenants use."""
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    for entry in catalog["models"]:
        if entry["name"] == PAINTER:
            entry["image"] |= {
                "adapter_urls": {"allowed": [f"{files.url}{ALLOWED}"]},
                "adapter_memory_bytes": ADAPTER_MEMORY_BYTES,
            }
        if entry["name"] == EMBEDDER:
            entry["price"] = {"per_million_tokens_usd": wasted.PRICE_USD}
    if any(attack.surface == DOCUMENTS for attack in attacks):
        catalog["models"].append(_reader(folder))
    catalog["flows"] = [_RACE]
    (folder / "models.yaml").write_text(yaml.safe_dump(catalog), encoding="utf-8")
    keys = [stored(QUIET, "quiet"), *(stored(name, name) for name in (BAD, *wasted.PLANS))]
    tenants = {plan: plan for plan in PLANS}
    settings = {
        "PENSTOCK_MODELS_FILE": str(folder / "models.yaml"),
        "PENSTOCK_KEYS_URL": keys_url(folder, plans=PLANS, tenants=tenants, keys=keys),
    }
    refresh_interfaces(folder / "models.yaml", say_nothing)
    settings |= {f"PENSTOCK_{name.upper()}": value for name, value in files.settings.items()}
    with served_stack(folder / "state", Ports.free(), settings, say_nothing) as stack:
        yield stack


def main() -> int:
    """Attacks as ordered, and reports."""
    step_back()
    (attack,) = (attack for attack in ATTACKS if attack.name == sys.argv[1])
    order = read_order(AttackOrder)
    act = attack.prepare()
    await_start()
    write_report(asyncio.run(_attack(act, attack, order)))
    return 0


async def _attack(act: Act, attack: Attack, order: AttackOrder) -> AttackReport:
    timeout, connector = aiohttp.ClientTimeout(total=60.0), aiohttp.TCPConnector(limit=0)
    until_s = time.monotonic() + order.seconds
    async with aiohttp.ClientSession(
        headers=bearer(attack.key), timeout=timeout, connector=connector
    ) as http:
        attacker = Attacker(order, http)

        async def act_again() -> None:
            while time.monotonic() < until_s:
                if await act(attacker) not in (200, 201):
                    await asyncio.sleep(AFTER_REFUSAL_S)

        tasks = [asyncio.create_task(act_again()) for _ in range(attack.callers)]
        await asyncio.wait(tasks, timeout=order.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    reasons = dict(attacker.reasons.most_common(MAX_REASONS))
    return AttackReport(dict(attacker.statuses), reasons)


def _message(said: bytes) -> str:
    try:
        body = json.loads(said)
    except ValueError:
        return said[:80].decode(errors="replace")
    error = body.get("error") or {}
    return str(error.get("message") or body.get("detail") or "")[:80]


if __name__ == "__main__":
    sys.exit(main())
