"""`penstock up`: the stack until Ctrl-C, with what a person needs to use it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.local.ports import Ports
from infra.local.stack import Stack
from shared.catalog import read_catalog

WATCH_S = 0.5


def served_stack(
    state_dir: Path, ports: Ports, settings: Mapping[str, str], say: Callable[[str], None] = print
) -> Stack:
    """The stack of `penstock up`, not started. Benchmarks measure it.

    Args:
        state_dir: as for Stack.
        ports: as for Stack.
        settings: as for Stack.
        say: as for Stack.
    """
    return Stack(state_dir, ports=ports, settings=settings, keep_messages=True, say=say)


def stay_up(state_dir: Path, ports: Ports, settings: Mapping[str, str]) -> int:
    """Runs everything until interrupted. Returns 1 if a part ended by itself.

    Args:
        state_dir: as for Stack.
        ports: as for Stack.
        settings: as for Stack.

    Raises:
        PenstockError: as Stack.
    """
    with served_stack(state_dir, ports, settings, _say) as stack:
        print(_usage(stack), flush=True)
        try:
            while not (failure := stack.failure()):
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
        "Pub/Sub": stack.settings.pubsub_endpoint or "Google's own",
        "BigQuery": stack.settings.bigquery_endpoint or "Google's own",
        "Redis": stack.settings.redis_url.rpartition("@")[2],
        "logs": str(stack.log_dir),
    }
    listed = "\n".join(f"  {what:<10}{where}" for what, where in lines.items())
    body = f'{{"model": "{model.name}", "input": ["a cat", "a kitten"]}}'
    curl = f"  curl {stack.api_url}/v1/embeddings -H 'Content-Type: application/json' -d '{body}'"
    return f"\nPenstock is up.\n\n{listed}\n\nTry\n\n{curl}\n\nCtrl-C stops it."


def _say(line: str) -> None:
    print(line, flush=True)
