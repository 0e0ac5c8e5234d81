"""The pages for incidents, followed line by line on a running stack.

Every line of their blocks runs in bash, in the order of the page. What only a project on Google
has (gcloud, kubectl, terraform) is noted instead. A line that says what it prints is repeated until
it does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import redis
import typer

from infra.cli.main import app
from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.tenants.plan import Plan
from tests.infra.running_up import CATALOG, MINI, SMALLEST
from tests.keys import bearer, key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow(about_s=60)

PAGES = Path("docs/how-to")
NAMES = ("pubsub-quota", "poisoned-model", "compromised-key", "lost-region")
PRELUDE = """
set -euo pipefail
note() { printf '%s\\n' "$*" >> "$NOTED"; }
gcloud() { note gcloud "$@"; }
kubectl() { note kubectl "$@"; }
terraform() { note terraform "$@"; }
penstock() { if [ "${2:-}" = --cluster ]; then note penstock "$@"; else command penstock "$@"; fi; }
"""
MODEL, REVISION = "mini", "1.0"
PRICED = CATALOG + f'    revision: "{REVISION}"\n    price: {{{{per_million_tokens_usd: 1000}}}}\n'


def lines_of(page: str) -> list[str]:
    """The commands of a page, one each."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
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
    """Somebody who types a page's lines.

    Args:
        stack: where.
        folder: the working folder.
        settings: what is theirs: the values of the page's `export` lines.
    """

    def __init__(self, stack: Stack, folder: Path, settings: Mapping[str, str]) -> None:
        self._stack = stack
        self._settings = {"URL": stack.api_url, "MODEL": MODEL, "P": "my-project"} | dict(settings)
        self._noted = folder / "noted"
        self._noted.write_text("")
        self._folder = folder
        self.printed: dict[str, str] = {}
        """The output of each line."""

    @property
    def noted(self) -> list[str]:
        """What was for Google or the cluster."""
        return self._noted.read_text().splitlines()

    def follows(self, page: str, before: Mapping[str, Callable[[], None]] | None = None) -> None:
        """Types every line, and calls what is to happen before some of them."""
        for line in lines_of(page):
            if line.startswith("export "):
                names = re.findall(r"(\w+)=", line.partition("#")[0])
                theirs = {name for name in names if not name.startswith("PENSTOCK_")}
                assert theirs <= self._settings.keys() | {"R", "ROOT", "LOST", "PLAN"}
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
        places = {"R": "europe-west1", "LOST": "europe-west4", "ROOT": "root", "PLAN": "team"}
        return (
            os.environ
            | self._stack.environment
            | places
            | self._settings
            | {"NOTED": str(self._noted), "PATH": f"{program}:{os.environ['PATH']}"}
        )

    def printed_by(self, start: str) -> str:
        """The output of the last line that begins so."""
        return [text for line, text in self.printed.items() if line.startswith(start)][-1]


def status(stack: Stack, key: str, text: str = "hello") -> int:
    """The status of a request with a key of tests/keys.py."""
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
    runbook = (PAGES / "operations.md").read_text(encoding="utf-8")
    assert f"({page}.md)" in runbook


def test_pubsub_quota(stack: Stack, tmp_path: Path) -> None:
    def frozen() -> None:
        becomes(401, lambda: status(stack, "acme"))
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
        becomes(401, lambda: status(stack, "acme"))

    reader.follows("compromised-key", {"penstock keys revoke": frozen})
    # Thawed: the other key of the tenant works again, and that one does not.
    becomes(200, lambda: status(stack, "acme"))
    assert status(stack, "leaked") == 401
    assert leaked.split("_")[2] in reader.printed_by("penstock keys audit")
    assert "revoke" in reader.printed_by("penstock keys audit")
    new = re.search(r"pk_live_\w+", reader.printed_by("penstock keys create"))
    assert new is not None


def test_poisoned_model(stack: Stack, tmp_path: Path) -> None:
    commands = typer.main.get_command(app).commands["models"].commands  # type: ignore[attr-defined]
    if "withdraw" not in commands:
        pytest.skip("penstock models withdraw is not in this tree")
    settings = {"KEY": key_for("default"), "REV": REVISION}
    reader = Reader(stack, tmp_path, settings)
    reader.follows("poisoned-model")
    assert "model_withdrawn" in "".join(reader.printed.values())
    assert MODEL in reader.printed_by("penstock models withdrawn")
    assert [one for one in reader.noted if "paused-replicas" in one] != []


def test_lost_region(stack: Stack, tmp_path: Path) -> None:
    """With all that its Redis had lost in the middle."""
    becomes(200, lambda: status(stack, "acme", "before the loss"))
    keys_file = Path(stack.environment["PENSTOCK_KEYS_URL"].removeprefix("file://"))
    reader = Reader(stack, tmp_path, {"KEY": key_for("default")})

    def loses() -> None:
        exported = subprocess.run(
            [sys.executable, "-m", "infra.cli.main", "keys", "export"],
            env=os.environ | stack.environment,
            capture_output=True,
            timeout=WAIT_LIMIT_S,
            check=True,
        )
        (tmp_path / "keys.json").write_bytes(exported.stdout)
        keys_file.unlink()
        with redis.Redis.from_url(stack.environment["PENSTOCK_REDIS_URL"]) as client:
            client.flushall()

    reader.follows("lost-region", {"penstock keys init": loses})
    assert keys_file.exists()
    becomes(200, lambda: status(stack, "acme", "after the loss"))
    assert "acme" in reader.printed_by("penstock budgets restore --dry-run")
    assert [one for one in reader.noted if one.startswith("terraform")] != []
