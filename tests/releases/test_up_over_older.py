"""`penstock up` on the state that the last release left, and then the other way around.

The last release is killed with images in its queue, as if the power had failed. This tree draws
them, and returns the stored data: predictions, a response under an Idempotency-Key, a batch and its
files. Then this tree is killed in the same way, and the last release starts on its state.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from google.cloud.bigquery import SchemaField

from infra.bigquery import create
from infra.local.ports import Ports
from infra.local.redis_server import find_redis_server
from tests.bigquery_client import connected
from tests.infra.running_up import ROOT, Up, running_up
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.releases.history import commit_of, last_release, tree_at

pytestmark = pytest.mark.slow(about_s=150)

CATALOG = """\
models:
  - name: drawer
    task: image
    source: package:models/shapes/pipeline
    batch: {max_pixel_steps: 2000000, max_items: 8}
    deadline: {default_s: 240, longest_s: 1200}
    image: {width: 64, height: 64, steps: 4, guidance_scale: 2.0, scheduler: default, largest_pixels: 262144}
    price: {per_million_pixel_steps_usd: 0.02}
"""  # noqa: E501
KEPT, QUEUED = 5, 12
"""Numbers of predictions. There are more in the queue than fit in a batch."""
ONCE = {"idempotency-key": "once", "content-type": "application/json"}
ONCE_BODY = json.dumps({"model": "drawer", "prompt": "once", "response_format": "b64_json"})
TIMES = ("created_at", "started_at", "completed_at")


class Owner:
    """Requests images and reads what was stored."""

    def __init__(self, up: Up) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{up.ports.api}", timeout=WAIT_LIMIT_S)

    def asks(self, prompt: str) -> str:
        """Creates a prediction that no caller waits for. Returns its id."""
        body = {"version": "drawer", "input": {"prompt": prompt, "seed": 7}}
        answer = self._http.post("/v1/predictions", json=body)
        assert answer.status_code == 201, answer.text
        name: str = answer.json()["id"]
        return name

    def once(self) -> httpx.Response:
        """Sends the same request under the same key."""
        return self._http.post("/v1/images/generations", content=ONCE_BODY, headers=ONCE)

    def reads(self, name: str) -> dict[str, Any]:
        """Returns a prediction as it is now."""
        answer = self._http.get(f"/v1/predictions/{name}")
        assert answer.status_code == 200, (name, answer.text)
        read: dict[str, Any] = answer.json()
        return read

    def waits_for(self, names: list[str]) -> list[dict[str, Any]]:
        """Returns predictions once they have finished. All of them must succeed."""
        deadline_s = time.monotonic() + START_LIMIT_S
        over = []
        for name in names:
            while (read := self.reads(name))["status"] in ("starting", "processing"):
                assert time.monotonic() < deadline_s, read
                time.sleep(0.1)
            assert read["status"] == "succeeded", read
            over.append(read)
        return over

    def image(self, prediction: dict[str, Any]) -> bytes:
        """A prediction's image, from its current link or its data."""
        output = prediction["output"]
        link = output[0] if isinstance(output, list) else output
        if link.startswith("data:"):
            return str(link).encode()
        return self._http.get(link).raise_for_status().content

    def closes(self) -> None:
        self._http.close()

    def uploads(self) -> str:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n")}}
        answer = self._http.post("/v1/files", **form)  # type: ignore[arg-type]
        name: str = answer.raise_for_status().json()["id"]
        return name

    def content(self, file: str) -> bytes:
        return self._http.get(f"/v1/files/{file}/content").raise_for_status().content


@contextmanager
def powered(folder: Path, tree: Path, ports: Ports) -> Iterator[tuple[Up, Owner]]:
    """A running `penstock up`. The power fails when the block ends."""
    # As docs/how-to/upgrade.md requires: the Redis that ships with 0.1.0 can't read what a newer
    # one wrote.
    server = folder / "bin" / "redis-server"
    server.parent.mkdir(exist_ok=True)
    server.unlink(missing_ok=True)
    server.symlink_to(find_redis_server())
    path = {"PATH": f"{server.parent}:{os.environ['PATH']}"}
    with running_up(folder, path, tree=tree, ports=ports, models=CATALOG) as up:
        assert "Ctrl-C stops it." in up.said, up.said
        owner = Owner(up)
        try:
            yield up, owner
        finally:
            owner.closes()
            for process in _all(up):
                process.kill()


def hold_worker(up: Up) -> None:
    """Pauses the workers, so that new requests stay in the queue."""
    for process in _all(up):
        if "workers" in process.cmdline():
            process.send_signal(signal.SIGSTOP)


def _all(up: Up) -> list[psutil.Process]:
    root = psutil.Process(up.process.pid)
    return [root, *root.children(recursive=True)]


def as_kept(prediction: dict[str, Any]) -> dict[str, Any]:
    """The prediction's fields that must not change."""
    names = ("id", "status", "input", "error", *TIMES)
    return {name: prediction.get(name) for name in names}


def test_state_of_the_last_release_and_back(tmp_path: Path) -> None:
    older = tree_at(commit_of(last_release()), tmp_path)
    ports = Ports.free(workers=1)
    folder = tmp_path / "site"
    folder.mkdir()
    with powered(folder, older, ports) as (up, owner):
        kept = owner.waits_for([owner.asks(f"kept {number}") for number in range(KEPT)])
        images = [owner.image(one) for one in kept]
        answer = owner.once()
        assert answer.status_code == 200, answer.text
        file = owner.uploads()
        hold_worker(up)
        queued = [owner.asks(f"queued {number}") for number in range(QUEUED)]
    with powered(folder, ROOT, ports) as (up, owner):
        drawn = owner.waits_for(queued)
        assert len(drawn) == QUEUED
        _check_kept(owner, kept, images)
        _check_repeated(owner, answer)
        assert owner.content(file) == b"{}\n"
        newer = owner.waits_for([owner.asks("of the newer one")])
        hold_worker(up)
        queued_newer = [owner.asks(f"queued later {number}") for number in range(QUEUED)]
    # 0.1.0 rejects tables with more columns than it knows about. Later releases leave them as they
    # are.
    (folder / "var/bigquery").rename(folder / "var/bigquery.newer")
    with powered(folder, older, ports) as (_, owner):
        assert len(owner.waits_for(queued_newer)) == QUEUED
        _check_kept(owner, [*kept, *newer], images)
        _check_repeated(owner, answer)
        assert owner.content(file) == b"{}\n"
        assert owner.waits_for([owner.asks("after the way back")])


def test_columns_of_a_later_release_stay(bigquery_endpoint: str) -> None:
    with connected(bigquery_endpoint, f"columns-{uuid4().hex[:8]}") as client:
        dataset = "penstock"
        create(client, dataset)
        table = client.get_table(f"{client.project}.{dataset}.rows")
        columns = [*table.schema, SchemaField("of_a_later_release", "STRING")]
        table.schema = columns
        client.update_table(table, ["schema"])
        create(client, dataset)
        assert client.get_table(table.reference).schema == columns


def _check_kept(owner: Owner, kept: list[dict[str, Any]], images: list[bytes]) -> None:
    read = [owner.reads(one["id"]) for one in kept]
    assert [as_kept(one) for one in read] == [as_kept(one) for one in kept]
    assert [owner.image(one) for one in read][: len(images)] == images


def _check_repeated(owner: Owner, answer: httpx.Response) -> None:
    again = owner.once()
    assert again.headers.get("idempotent-replayed") == "true"
    assert again.text == answer.text
