"""`pubsub-emulator`, or `python -m pubsub_emulator`: serves until SIGTERM or SIGINT."""

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from pubsub_emulator.calls.broker import DEFAULT_STORAGE_BYTES
from pubsub_emulator.server import serve
from pubsub_emulator.state.resources import is_http_url

YOUNG_OBJECTS = 20_000
"""Number of allocations between two garbage collector passes over young objects.

With the default of 700, there would be several passes per call.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server. Returns the exit code.

    Args:
        argv: the arguments without the program name. None: the process's arguments.
    """
    parser = argparse.ArgumentParser(prog="pubsub-emulator", description="Serve google.pubsub.v1.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=_number(0, 65_535),
        default=8085,
        help="0 picks a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--rest-port",
        type=_number(0, 65_535),
        help="also serve REST, as used by gcloud, on this port; 0 picks a free one",
    )
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="a Unix socket to listen on as well"
    )
    parser.add_argument(
        "--storage-mib",
        type=_number(1, 1024**2),
        default=DEFAULT_STORAGE_BYTES // 1024**2,
        help=(
            "maximum memory of all messages, in MiB; further publishes are rejected (default: "
            "%(default)s)"
        ),
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="directory for all data (default: in memory)"
    )
    parser.add_argument(
        "--fsync",
        action="store_true",
        help=("with --data-dir: also survive a power failure, which is slower"),
    )
    parser.add_argument(
        "--bigquery-endpoint",
        type=_web_url,
        metavar="URL",
        help="URL of a BigQuery without credentials, for BigQuery subscriptions (default: they "
        "are rejected)",
    )
    options = parser.parse_args(argv)
    try:
        uvloop.run(_serve_until_signal(options))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text} must be from {least} to {most}")
        return int(text)

    return number


def _web_url(text: str) -> str:
    if not is_http_url(text):
        raise argparse.ArgumentTypeError(f"{text} must be an http or https URL")
    return text


async def _serve_until_signal(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(
        options.host,
        options.port,
        rest_port=options.rest_port,
        socket_path=options.socket,
        storage_bytes=options.storage_mib * 1024**2,
        data_dir=options.data_dir,
        fsync=options.fsync,
        bigquery_endpoint=options.bigquery_endpoint or "",
    ) as server:
        sys.stdout.write(f"Pub/Sub listening on {server.endpoint}\n")
        if server.rest_endpoint:
            sys.stdout.write(f"Pub/Sub REST listening on {server.rest_endpoint}\n")
        sys.stdout.flush()
        _settle_heap()
        await stop.wait()


def _settle_heap() -> None:
    """Excludes all startup objects from later collections, and makes collections rarer.

    Millions of messages accumulate. The collector visits them in small portions (400,000 take 0.1
    s) and almost never all at once.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 2, 1000)


if __name__ == "__main__":
    sys.exit(main())
