"""The incident pages, followed line by line on a running stack.

Every line in their code blocks runs in bash, in the page's order. Commands that need a Google
project (gcloud, kubectl, terraform) are recorded instead. A line with documented output is repeated
until it prints that output.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from infra.local.ports import Ports
from infra.local.redis_server import RedisServer
from infra.local.stack import Stack
from shared.tenants.plan import Plan
from tests.bigquery_client import connected, rows_of
from tests.infra.running_up import CATALOG, MINI, SMALLEST
from tests.keys import bearer, key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=100)

PAGES = Path("docs/how-to")
NAMES = ("pubsub-quota", "poisoned-model", "compromised-key", "lost-region")
PRELUDE = """
set -euo pipefail
note() { printf '%s\\n' "$*" >> "$NOTED"; }
gcloud() { note gcloud "$@"; }
kubectl() { note kubectl "$@"; }
terraform() { note terraform "$@"; }
jq() { note jq "$@"; }
sh() { note sh "$@"; }
penstock() { if [ "${2:-}" = --cluster ]; then note penstock "$@"; else command penstock "$@"; fi; }
"""
PLACES = {"R": "europe-west1", "LOST": "europe-west4", "ROOT": "root", "PLAN": "team"}
MODEL, REVISION = "mini", "1.0"
PRICED = CATALOG + f'    revision: "{REVISION}"\n    price: {{{{per_million_tokens_usd: 1000}}}}\n'


def lines_of(page: str, heading: str = "") -> list[str]:
    """A page's commands, or those in one of its sections, as separate items."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert text, f"{page} has no section {heading}"
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The pipeline with a small model, two tenants, and a plan with a budget."""
    folder = tmp_path_factory.mktemp("incident")
    (folder / "models.yaml").write_text(PRICED.format(source=MINI))
    keys = keys_url(
        folder,
        plans={"team": Plan(budget_usd_per_month=100.0)},
        tenants={"acme": "team"},
        default="default",
        acme="acme",
        leaked="acme",
    )
    settings = SMALLEST | {
        "PENSTOCK_KEYS_URL": keys,
        "PENSTOCK_MODELS_FILE": str(folder / "models.yaml"),
    }
    with Stack(folder / "var", ports=Ports.free(1), settings=settings) as running:
        yield running


class Reader:
    """A person who types the lines on a page.

    Args:
        settings: values for the page's `export` lines.
    """

    def __init__(self, stack: Stack, folder: Path, settings: Mapping[str, str]) -> None:
        self._stack = stack
        self._settings = {"URL": stack.api_url, "MODEL": MODEL, "P": "my-project"} | dict(settings)
        self._noted = folder / "noted"
        self._noted.write_text("")
        self._folder = folder
        self.printed: dict[str, str] = {}
        """Each line's output."""

    def gets(self, settings: Mapping[str, str]) -> None:
        """Changes some of the reader's settings, as a move would."""
        self._settings |= settings

    @property
    def noted(self) -> list[str]:
        """The recorded commands for Google or the cluster."""
        return self._noted.read_text().splitlines()

    def follows(self, page: str, before: Mapping[str, Callable[[], None]] | None = None) -> None:
        """Types every line; before certain lines, calls the matching function in `before`."""
        for line in lines_of(page):
            if line.startswith("export "):
                names = re.findall(r"(\w+)=", line.partition("#")[0])
                theirs = {name for name in names if not name.startswith(("PENSTOCK_", "TF_VAR_"))}
                assert theirs <= self._settings.keys() | {*PLACES, "STATE_BUCKET"}
                continue
            for start, act in (before or {}).items():
                if line.startswith(start):
                    act()
            self._types(line)

    def _types(self, line: str) -> None:
        wanted = line.partition("  # prints ")[2]
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            done = subprocess.run(
                ["bash", "-c", PRELUDE + line],
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WAIT_LIMIT_S,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if wanted in done.stdout:
                break
            assert time.monotonic() < deadline_s, f"{line}\n{done.stdout}"
            time.sleep(0.5)
        self.printed[line] = done.stdout

    def _environment(self) -> dict[str, str]:
        program = Path(sys.executable).parent
        return (
            os.environ
            | self._stack.environment
            | PLACES
            | self._settings
            | {"NOTED": str(self._noted), "PATH": f"{program}:{os.environ['PATH']}"}
        )

    def printed_by(self, start: str) -> str:
        """The output of the last line that starts with this text."""
        return [text for line, text in self.printed.items() if line.startswith(start)][-1]


def status(stack: Stack, key: str, text: str = "hello") -> int:
    """The status of a request made with one of the keys in tests/keys.py."""
    body = json.dumps({"model": MODEL, "input": text}).encode()
    headers = bearer(key) | {"content-type": "application/json"}
    asked = urllib.request.Request(f"{stack.api_url}/v1/embeddings", body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_LIMIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def becomes(wanted: int, ask: Callable[[], int]) -> None:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while ask() != wanted:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


@pytest.mark.parametrize("page", NAMES)
def test_page_has_what_somebody_needs_at_night(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads[0] == "Symptoms"
    assert heads[-1] == "Undo"
    assert {"Did it work?", "Does it work again?"} & set(heads)
    runbook = (PAGES / "troubleshoot.md").read_text(encoding="utf-8")
    assert f"({page}.md)" in runbook


def test_pubsub_quota(stack: Stack, tmp_path: Path) -> None:
    def frozen() -> None:
        becomes(403, lambda: status(stack, "acme"))
        assert status(stack, "default") == 200

    reader = Reader(stack, tmp_path, {"KEY": key_for("default"), "TENANT": "acme"})
    reader.follows("pubsub-quota", {"penstock plans set": frozen, "penstock tenants thaw": frozen})
    becomes(200, lambda: status(stack, "acme"))
    assert "acme" not in reader.printed_by("penstock plans remove")
    assert any("quotas preferences create" in one for one in reader.noted)


def test_compromised_key(stack: Stack, tmp_path: Path) -> None:
    leaked = key_for("leaked")
    becomes(200, lambda: status(stack, "leaked", "a thief"))
    settings = {"KEY": leaked, "TENANT": "acme", "ID": leaked.split("_")[2]}
    reader = Reader(stack, tmp_path, settings)

    def frozen() -> None:
        becomes(403, lambda: status(stack, "acme"))

    reader.follows("compromised-key", {"penstock keys revoke": frozen})
    # After unfreezing, the tenant's other key works again, but this one doesn't.
    becomes(200, lambda: status(stack, "acme"))
    assert status(stack, "leaked") == 401
    assert leaked.split("_")[2] in reader.printed_by("penstock keys audit")
    assert "revoke" in reader.printed_by("penstock keys audit")
    new = re.search(r"pk_live_\w+", reader.printed_by("penstock keys create"))
    assert new is not None


def test_poisoned_model(stack: Stack, tmp_path: Path) -> None:
    settings = {"KEY": key_for("default"), "REV": REVISION}
    reader = Reader(stack, tmp_path, settings)
    reader.follows("poisoned-model")
    assert "model_withdrawn" in "".join(reader.printed.values())
    assert MODEL in reader.printed_by("penstock models withdrawn")
    assert [one for one in reader.noted if "paused-replicas" in one] != []


class LostHome:
    """A region whose home is another region, so the other region's Redis has the records and the
    keys.

    Pub/Sub, BigQuery and the row bucket belong to neither.

    Args:
        settings: apply to the services outside any region.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = SMALLEST | dict(settings)
        self._ports = Ports.free(1)
        self._running = ExitStack()
        self._cache = RedisServer(folder / "cache", folder)
        self.answered: set[str] = set()
        """Ids of the requests that got a 200."""

    def __enter__(self) -> Self:
        self._cache.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()
        self._cache.stop()

    def has(self, records: RedisServer) -> dict[str, str]:
        """The settings for a region that uses these records."""
        return self._settings | {
            "PENSTOCK_REDIS_URL": self._cache.url,
            "PENSTOCK_RECORDS_URL": records.url,
            "PENSTOCK_KEYS_URL": records.url,
        }

    def runs(self, records: RedisServer) -> Stack:
        """Replaces the API, workers and row archive, as an apply does."""
        self._running.close()
        stack = Stack(self._folder / "var", ports=self._ports, settings=self.has(records))
        return self._running.enter_context(stack)

    def ask(self, stack: Stack, key: str, text: str, **headers: str) -> int:
        """Returns the status of a request."""
        body = json.dumps({"model": MODEL, "input": text}).encode()
        head = bearer(key) | {"content-type": "application/json"}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        asked = urllib.request.Request(f"{stack.api_url}/v1/embeddings", body, head)
        try:
            with urllib.request.urlopen(asked, timeout=WAIT_LIMIT_S) as answer:
                self.answered.add(answer.headers["x-request-id"])
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def command(settings: Mapping[str, str], *words: str) -> str:
    """Runs a `penstock` command and returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *words],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lost_region(tmp_path: Path, pubsub_endpoint: str, bigquery_endpoint: str) -> None:
    """The home region is gone permanently: its Redis disappears while requests run, and another
    region takes over.
    """
    (tmp_path / "models.yaml").write_text(PRICED.format(source=MINI))
    first_keys = keys_url(
        tmp_path / "first",
        plans={"team": Plan(budget_usd_per_month=100.0)},
        tenants={"acme": "team"},
        default="default",
        acme="acme",
    ).removeprefix("file://")
    project = f"lost-{secrets.token_hex(4)}"
    outside = {
        "PENSTOCK_PROJECT": project,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
        "PENSTOCK_MODELS_FILE": str(tmp_path / "models.yaml"),
        "PENSTOCK_ROWS_URL": (tmp_path / "bucket").as_uri(),
        "PENSTOCK_ARCHIVE_EVERY_S": "1",
    }
    home, next_home = (RedisServer(tmp_path / name, tmp_path) for name in ("home", "next"))
    with ExitStack() as undo:
        undo.callback(next_home.stop)
        undo.callback(home.stop)
        region = undo.enter_context(LostHome(tmp_path, outside))
        home.start()
        command(region.has(home), "keys", "init", "--from", first_keys)
        stack = region.runs(home)
        for number in range(20):
            assert region.ask(stack, "acme", f"before {number}") == 200
            assert region.ask(stack, "default", f"before {number}") == 200
        assert region.ask(stack, "acme", "once", idempotency_key="once") == 200
        exported = command(region.has(home), "keys", "export")
        home.stop()

        reader = Reader(stack, tmp_path, {"KEY": key_for("default")} | region.has(home))

        def is_away() -> None:
            # Requests that need the records wait for them. All other requests proceed.
            assert region.ask(stack, "acme", "once", idempotency_key="once") == 503
            for number in range(20):
                assert region.ask(stack, "acme", f"meanwhile {number}") == 200

        def has_redis() -> None:
            next_home.start()
            reader.gets(region.has(next_home))

        def has_export() -> None:
            (tmp_path / "keys.json").write_text(exported)

        def is_replaced() -> None:
            region.runs(next_home)
            becomes(200, lambda: region.ask(stack, "acme", "first"))

        reader.follows(
            "lost-region",
            {
                "gcloud artifacts repositories": is_away,
                'terraform -chdir="$ROOT" apply -target': has_redis,
                "NEWEST=": has_export,
                "penstock budgets restore --dry-run": is_replaced,
            },
        )
        # Previous keys work, and no others. The stored response for the key is computed again.
        assert region.ask(stack, "acme", "once", idempotency_key="once") == 200
        assert region.ask(stack, "stranger", "hello") == 401
        assert "acme" in reader.printed_by("penstock budgets restore --dry-run")
        for number in range(20):
            assert region.ask(stack, "acme", f"after {number}") == 200
        becomes(
            0, lambda: len(region.answered - rows_of_requests(bigquery_endpoint, project).keys())
        )
        found = rows_of_requests(bigquery_endpoint, project)
        assert set(found.values()) == {1}
        # The page itself sends one request to check that everything works.
        assert len(found) == len(region.answered) + 1
        # Once more, following the page. After that, the counters match the rows to the cent.
        command(region.has(next_home), "budgets", "restore")
        last = command(region.has(next_home), "budgets", "restore", "--dry-run")
        assert "all budgets match their rows" in last
    noted = reader.noted
    noted = noted[next(at for at, one in enumerate(noted) if ORDER[0] in one) :]
    first = {word: next(at for at, one in enumerate(noted) if word in one) for word in ORDER}
    assert list(first.values()) == sorted(first.values())


ORDER = (
    "repositories list",
    "state rm",
    "-target=module.platform.module.records",
    "apply -var project_id=my-project",
)
"""Registry, state, keys, subscriptions."""


def rows_of_requests(endpoint: str, project: str) -> dict[str, int]:
    """The number of rows per request that got a response."""
    query = (
        "SELECT request_id, COUNT(*) FROM penstock.rows_deduplicated"
        " WHERE received_at >= TIMESTAMP '2000-01-01' AND status = 'succeeded' GROUP BY request_id"
    )
    with connected(endpoint, project) as client:
        return {str(name): int(str(count)) for name, count in rows_of(client, query)}
