"""`penstock up`: runs the stack until Ctrl-C and prints instructions for using it.

A part that dies is restarted. The other parts keep their state, just like in the cloud. If other
machines can reach the API, it requires keys and does not send webhooks to private addresses.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from infra.current_user import current_user
from infra.local.interfaces import local_classes, refresh_interfaces
from infra.local.ports import Ports
from infra.local.reload import Reloader
from infra.local.running_stack import Announcement, RunningStack, hold_state_folder
from infra.local.stack import Broker, Stack
from infra.local.supervision import Supervisor
from infra.rollout.examples import EXAMPLES
from shared.process.inspection import deny_inspection
from shared.process.loopback import is_loopback
from shared.stores.key_stores import key_store
from shared.tenants.administration import Administration, KeyRequest
from shared.tenants.directory import Document
from shared.tenants.key_store import NoDirectory

KEYS_FILE = "keys.json"
FIRST_KEY = KeyRequest("default", "first")
PLAIN = (
    "other machines can reach the API without TLS, so keys are sent in plain text: set "
    "--tls-cert and --tls-key, or put a proxy in front (docs/how-to/self-hosting.md)"
)

WATCH_S = 0.25
MODELS_FILE = "models.yaml"


def secure_settings(
    state_dir: Path,
    variables: Mapping[str, str],
    say: Callable[[str], None],
    *,
    may_show_key: bool,
) -> dict[str, str]:
    """Returns a stack's settings, securing its API if other machines can reach it.

    On loopback, the settings are unchanged. Otherwise, keys are required: if no key directory is
    configured, one is created in the state folder. The first start creates a key, or prints the
    command that does.

    Args:
        may_show_key: True if only the user will see these lines. Otherwise, no key is created,
            because it would end up in logs.

    Raises:
        PenstockError: the key directory can't be read or created.
    """
    if is_loopback(variables.get("PENSTOCK_HOST", "127.0.0.1")):
        return dict(variables)
    settings = {"PENSTOCK_WEBHOOKS_PRIVATE": "0", **variables}
    if not variables.get("PENSTOCK_TLS_CERT"):
        say(PLAIN)
    if not settings.get("PENSTOCK_KEYS_URL"):
        state_dir.mkdir(parents=True, exist_ok=True)
        settings["PENSTOCK_KEYS_URL"] = url = keys_url(state_dir)
        asyncio.run(_first_key(url, say, may_show_key=may_show_key))
    return settings


def keys_url(state_dir: Path) -> str:
    """Returns the URL of the key directory in the state folder."""
    return (state_dir / KEYS_FILE).resolve().as_uri()


async def _ensure_directory(url: str) -> None:
    """Creates an empty key directory if there is none, so that commands can change it."""
    async with key_store(url, is_writable=True) as store:
        admin = Administration(store, actor="penstock up", address=socket.gethostname())
        try:
            await admin.read()
        except NoDirectory:
            await admin.start_directory(Document())


async def _first_key(url: str, say: Callable[[str], None], *, may_show_key: bool) -> None:
    await _ensure_directory(url)
    async with key_store(url, is_writable=True) as store:
        admin = Administration(store, actor=current_user(), address=socket.gethostname())
        if (await admin.read()).keys:
            return
        if may_show_key:
            issued = await admin.create_key(FIRST_KEY)
            say(
                f"the first key, for the tenant {FIRST_KEY.tenant}. "
                "Save it now; it will not be shown again:"
            )
            say(f"  {issued.key.text}")
        else:
            command = f"penstock keys create --tenant {FIRST_KEY.tenant} --name {FIRST_KEY.name}"
            say("there are no keys yet, so every request is rejected; create one:")
            say(f"  PENSTOCK_KEYS_URL={url} {command}")


def build_stack(
    state_dir: Path,
    ports: Ports,
    settings: Mapping[str, str],
    say: Callable[[str], None] = print,
    broker: Broker = "pubsub",
) -> Stack:
    """Returns the stack that `penstock up` runs, without starting it. Benchmarks measure it."""
    return Stack(
        state_dir, ports=ports, settings=settings, keep_messages=True, broker=broker, say=say
    )


def stay_up(
    state_dir: Path, ports: Ports, settings: Mapping[str, str], broker: Broker = "pubsub"
) -> int:
    """Runs the stack until interrupted. Returns 1 if a part other than a worker died too often.

    Raises:
        PenstockError: see Stack.
    """
    settings = secure_settings(state_dir, settings, _say, may_show_key=sys.stdout.isatty())
    models_file = Path(settings.get("PENSTOCK_MODELS_FILE", MODELS_FILE))
    deny_inspection()  # a custom class runs as the same user
    with hold_state_folder(state_dir) as announcement:
        if not settings.get("PENSTOCK_KEYS_URL"):
            asyncio.run(_ensure_directory(keys_url(state_dir)))
        refresh_interfaces(models_file, _say)
        stack = build_stack(state_dir, ports, settings, _say, broker)
        announce = partial(_announce, announcement, stack)
        announce()
        with stack.without_waiting():
            try:
                failure = _supervise(stack, models_file, announce)
            except KeyboardInterrupt:
                print("\nstopping …", flush=True)
                return 0
    print(f"penstock: {failure}", file=sys.stderr)
    return 1


def _supervise(stack: Stack, models_file: Path, announce: Callable[[], None]) -> str:
    """Restarts parts that die. Returns the reason the stack can't continue."""
    supervisor = Supervisor(stack.parts, stack.report)
    reloader = Reloader(
        local_classes(models_file), stack.workers, stack.processes, supervisor, stack.report
    )
    has_told = False
    try:
        while not (failure := supervisor.look()):
            announce()
            if supervisor.is_settled and not has_told:
                print(_usage(stack, supervisor.not_ready), flush=True)
                has_told = True
            reloader.look()
            time.sleep(WATCH_S)
    finally:
        reloader.close()
    return failure


def _announce(announcement: Announcement, stack: Stack) -> None:
    """Writes the file that lets commands find this stack."""
    settings = {"PENSTOCK_KEYS_URL": keys_url(stack.state_dir), **stack.environment}
    running = {name: part.pid for name, part in stack.processes.items() if part.is_running}
    needs_keys = bool(stack.environment.get("PENSTOCK_KEYS_URL"))
    announcement.update(RunningStack(settings, running, needs_keys))


def _usage(stack: Stack, not_ready: Sequence[str]) -> str:
    models = stack.models
    missing = [model.name for model in models if stack.workers[model.name] in not_ready]
    model = next((model for model in models if model.name not in missing), models[0])
    title = f"Penstock is up, without {', '.join(missing)}." if missing else "Penstock is up."
    lines = {
        "console": f"{stack.api_url}/console (try models, see usage and invoices)",
        "API": f"{stack.api_url}/v1 (docs: {stack.api_url}/docs, metrics: http://127.0.0.1:{stack.ports.metrics}/metrics)",
        **_broker(stack),
        "BigQuery": stack.settings.bigquery_endpoint or "Google's own",
        "Redis": stack.settings.redis_url.rpartition("@")[2],
        "logs": str(stack.log_dir),
    }
    listed = "\n".join(f"  {label:<10}{where}" for label, where in lines.items())
    example = EXAMPLES[model.task].request(model, "a mill by a river")
    body = json.dumps(example.body)
    # The certificate is for the name that other machines use.
    options = " -k" if stack.settings.tls_cert else ""
    if stack.settings.keys_url:
        options += " -H 'Authorization: Bearer YOUR_KEY'"
    url = f"{stack.api_url}{example.path}"
    curl = f"  curl {url}{options} -H 'Content-Type: application/json' -d '{body}'"
    return f"\n{title}\n\n{listed}\n\nTry\n\n{curl}\n\nCtrl-C stops it."


def _broker(stack: Stack) -> dict[str, str]:
    if stack.settings.broker:
        return {"RabbitMQ": stack.settings.broker.rpartition("@")[2]}
    return {"Pub/Sub": stack.settings.pubsub_endpoint or "Google's own"}


def _say(line: str) -> None:
    print(line, flush=True)
