"""`bigquery-emulator`, or `python -m bigquery_emulator`: serves until SIGTERM or SIGINT."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from bigquery_emulator.server import serve

DEFAULT_PORT = 9050


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM.

    Args:
        argv: the arguments without the program name. None: the process's arguments.

    Returns:
        The exit status: 0, or 1 if the port or the data directory is not available.
    """
    parser = argparse.ArgumentParser(
        prog="bigquery-emulator", description="Serve BigQuery's REST API v2 over DuckDB."
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0 picks a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="directory for the data (default: in memory)"
    )
    options = parser.parse_args(argv)
    try:
        anyio.run(_run, options.host, options.port, options.data_dir)
    except OSError as error:
        print(f"bigquery-emulator: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(host: str, port: int, data_dir: Path | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with serve(host, port, data_dir) as server:
            print(f"BigQuery listening on {server.host}:{server.port}", flush=True)
            async for _ in signals:
                return


if __name__ == "__main__":
    sys.exit(main())
