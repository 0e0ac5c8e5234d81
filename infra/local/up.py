"""`penstock up`: the stack until Ctrl-C, with what a person needs to use it.

A part that dies is started again. The others keep what they hold meanwhile, as they would in the
cloud.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.local.exposure import exposed_settings
from infra.local.ports import Ports
from infra.local.stack import Broker, Stack
from infra.local.supervision import Supervisor
from shared.catalog import read_catalog

WATCH_S = 0.25


def served_stack(
    state_dir: Path,
    ports: Ports,
    settings: Mapping[str, str],
    say: Callable[[str], None] = print,
    broker: Broker = "pubsub",
) -> Stack:
    """The stack of `penstock up`, not started. Benchmarks measure it.

    Args:
        state_dir: as for Stack.
        ports: as for Stack.
        settings: as for Stack.
        say: as for Stack.
        broker: as for Stack.
    """
    return Stack(
        state_dir, ports=ports, settings=settings, keep_messages=True, broker=broker, say=say
    )


def stay_up(
    state_dir: Path, ports: Ports, settings: Mapping[str, str], broker: Broker = "pubsub"
) -> int:
    """Runs everything until interrupted. Returns 1 if a part died too often.

    Args:
        state_dir: as for Stack.
        ports: as for Stack.
        settings: as for Stack.
        broker: as for Stack.

    Raises:
        PenstockError: as Stack.
    """
    settings = exposed_settings(state_dir, settings, _say, may_show_key=sys.stdout.isatty())
    with served_stack(state_dir, ports, settings, _say, broker) as stack:
        print(_usage(stack), flush=True)
        supervisor = Supervisor(stack.parts, stack.tell)
        try:
            while not (failure := supervisor.look()):
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            print("\nstopping …", flush=True)
            return 0
    print(f"penstock: {failure}", file=sys.stderr)
    return 1


def _usage(stack: Stack) -> str:
    model = read_catalog(stack.settings.models_file).models[0]
    lines = {
        "API": f"{stack.api_url}/v1 (docs: {stack.api_url}/docs, metrics: http://127.0.0.1:{stack.ports.metrics}/metrics)",
        **_broker(stack),
        "BigQuery": stack.settings.bigquery_endpoint or "Google's own",
        "Redis": stack.settings.redis_url.rpartition("@")[2],
        "logs": str(stack.log_dir),
    }
    listed = "\n".join(f"  {what:<10}{where}" for what, where in lines.items())
    example = model.definition.example_request(model, "a mill by a river")
    body = json.dumps(example.body)
    # The certificate is for the name that others use.
    options = " -k" if stack.settings.tls_cert else ""
    if stack.settings.keys_url:
        options += " -H 'Authorization: Bearer YOUR_KEY'"
    url = f"{stack.api_url}{example.path}"
    curl = f"  curl {url}{options} -H 'Content-Type: application/json' -d '{body}'"
    return f"\nPenstock is up.\n\n{listed}\n\nTry\n\n{curl}\n\nCtrl-C stops it."


def _broker(stack: Stack) -> dict[str, str]:
    if stack.settings.broker:
        return {"RabbitMQ": stack.settings.broker.rpartition("@")[2]}
    return {"Pub/Sub": stack.settings.pubsub_endpoint or "Google's own"}


def _say(line: str) -> None:
    print(line, flush=True)
