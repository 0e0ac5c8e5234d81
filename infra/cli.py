"""The `penstock` command: the local stack, its servers one by one, the two processes of the product, reports.

Every subcommand imports what it needs when it runs, so that `penstock --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infra.local.ports import Ports
from shared.errors import ConfigurationError, PenstockError

STATE_DIR = Path("var")
"""Where `penstock up` keeps logs, rows and objects."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status.

    Args:
        argv: the words after `penstock`; those of this process when None.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.run not in (_pubsub, _bigquery, _bench, _optimize, _deploy):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(options.run(options))
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Models behind an HTTPS API, over Pub/Sub.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    up = commands.add_parser("up", help="start the whole pipeline here and keep it up")
    for name, port in (("api", Ports.api), ("pubsub", Ports.pubsub), ("bigquery", Ports.bigquery)):
        up.add_argument(f"--{name}-port", type=int, default=port, metavar="PORT", help="(default: %(default)s)")
    up.add_argument("--redis-port", type=int, default=Ports.redis, metavar="PORT", help="(default: %(default)s)")
    up.add_argument(
        "--functions-port", type=int, default=Ports.functions, metavar="PORT", help="(default: %(default)s)"
    )
    up.add_argument(
        "--metrics-port", type=int, default=Ports.metrics, metavar="PORT", help="of the API (default: %(default)s)"
    )
    up.add_argument(
        "--health-port", type=int, default=8091, metavar="PORT", help="of the first worker (default: %(default)s)"
    )
    up.set_defaults(run=_up)

    demo = commands.add_parser("demo", help="start everything, send real input, show what came of it, stop")
    demo.add_argument("--prompt", metavar="TEXT", help="of the picture to draw")
    demo.add_argument("--edit-prompt", metavar="TEXT", help="of the picture to make from that one")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser("doctor", help="say what is missing or out of reach, and how to fix it")
    doctor.set_defaults(run=_doctor)

    pubsub = commands.add_parser("pubsub", add_help=False, help="the embedded Pub/Sub alone (--host --port --data-dir)")
    pubsub.set_defaults(run=_pubsub)
    bigquery = commands.add_parser("bigquery", add_help=False, help="the embedded BigQuery alone (--host --port)")
    bigquery.set_defaults(run=_bigquery)

    api = commands.add_parser("api", help="the API alone, as the PENSTOCK_* settings say")
    api.set_defaults(run=_api)

    worker = commands.add_parser("worker", help="one worker alone, as the PENSTOCK_* settings say")
    worker.add_argument("--model", required=True, help="the entry of the catalog that it serves")
    worker.set_defaults(run=_worker)

    optimize = commands.add_parser(
        "optimize", add_help=False, help="make an optimized artifact of a model, judged first"
    )
    optimize.set_defaults(run=_optimize)

    bench = commands.add_parser("bench", add_help=False, help="measure the pipeline here, in a checkout (--profile)")
    bench.set_defaults(run=_bench)

    deploy = commands.add_parser(
        "deploy", add_help=False, help="plan: what a deployment needs and costs, before any apply"
    )
    deploy.set_defaults(run=_deploy)

    report = commands.add_parser("report", help="run a usage report on the configured BigQuery")
    report.add_argument("name", nargs="?", default="", help="which; without it, the shipped ones are listed")
    report.add_argument("--days", type=int, default=7, help="how many days back (default: %(default)s)")
    report.set_defaults(run=_report)
    return parser


def _up(options: argparse.Namespace) -> int:
    from infra.local.up import stay_up
    from shared.settings import given_settings

    health = range(options.health_port, options.health_port + 100)
    own = (options.api_port, options.pubsub_port, options.bigquery_port, options.redis_port)
    return stay_up(STATE_DIR, Ports(*own, health, options.functions_port, options.metrics_port), given_settings())


def _demo(options: argparse.Namespace) -> int:
    from infra.local.demo import EDIT_PROMPT, PROMPT, run_demo

    return run_demo(STATE_DIR / "demo", options.prompt or PROMPT, options.edit_prompt or EDIT_PROMPT)


def _doctor(_: argparse.Namespace) -> int:
    from infra.local.doctor import examine

    return examine()


def _pubsub(options: argparse.Namespace) -> int:
    from infra.emulators.pubsub.__main__ import main as serve

    return serve(options.rest)


def _bigquery(options: argparse.Namespace) -> int:
    from infra.emulators.bigquery.__main__ import main as serve

    return serve(options.rest)


def _api(_: argparse.Namespace) -> int:
    return _become("api", {})


def _worker(options: argparse.Namespace) -> int:
    return _become("workers", {"PENSTOCK_MODEL": options.model})


def _optimize(options: argparse.Namespace) -> int:
    return _become("workers.optimize", {}, options.rest)


def _bench(options: argparse.Namespace) -> int:
    if not Path("bench/__main__.py").is_file():
        raise ConfigurationError("there are no benchmarks in this folder: run it at the top of a checkout")
    return _become("bench", {}, options.rest)


def _deploy(options: argparse.Namespace) -> int:
    from infra.deploy.__main__ import main as plan

    return plan(options.rest)


def _report(options: argparse.Namespace) -> int:
    from infra.reports import list_reports, show_report
    from shared.settings import Settings, read_settings

    if not options.name:
        return list_reports()
    return show_report(read_settings(Settings), options.name, days=options.days)


def _become(module: str, settings: dict[str, str], words: Sequence[str] = ()) -> int:
    """Replaces this process, so that signals and the exit status are the other's; infra never imports it."""
    from shared.settings import environment_with, given_settings

    sys.stdout.flush()
    command = [sys.executable, "-m", module, *words]
    os.execve(command[0], command, environment_with(given_settings() | settings))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
