"""The `penstock` command: the local stack, its servers, the product's processes, and reports.

Each command imports the code it runs only when it is called, so `penstock --help` is quick, and an
image without `workers` can run `penstock api`. Only this package may import `api` and `workers`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from infra.amounts import check_amount
from infra.cli import keys
from infra.cli.budgets import budgets
from infra.cli.canaries.commands import canary
from infra.cli.dead_letters.commands import dead_letters
from infra.cli.models import init, models, predict
from infra.cli.optimize import optimize
from infra.cli.weights import weights
from infra.local.ports import Ports
from infra.reports.commands import invoice, report, run_daily
from shared.errors import BadInput, ConfigurationError, PenstockError
from shared.process.loopback import exempt_loopback_from_proxies

OF_KEYS = frozenset({"keys", "tenants", "plans"})
OF_OPERATORS = OF_KEYS | {
    *("report", "invoice", "run-daily", "budgets", "canary", "dead-letters", "models", "load"),
    *("doctor", "provision"),
}
"""Commands that use the stack running in this folder, unless a setting names a different one."""
SERVING = ("api", "workers")
"""Penstock packages that an image may lack."""
TOOLS = "penstock.commands"
"""Entry point group for tools: functions that add a command to the application."""
STATE_DIR = Path("var")
"""The folder in which `penstock up` keeps logs, rows and objects."""

Port = Annotated[int, typer.Option(metavar="PORT")]
BrokerOption = Annotated[
    Literal["pubsub", "rabbitmq"],
    typer.Option(help="rabbitmq requires rabbitmq-server on this machine"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for use by programs")]

_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings for commands that pass their arguments, including `--help`, to another program."""


class _Commands(TyperGroup):
    """Converts an exception that a command raises to a message and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            typer.echo(f"penstock: {error.message}", err=True)
            raise typer.Exit(1) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in SERVING:
                raise
            typer.echo(
                f"penstock {ctx.invoked_subcommand} requires the package {package}, which is not "
                "installed",
                err=True,
            )
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
app.add_typer(keys.keys, name="keys")
app.add_typer(keys.tenants, name="tenants")
app.add_typer(keys.plans, name="plans")
app.add_typer(canary, name="canary")
app.add_typer(dead_letters, name="dead-letters")


def add_tool(commands: typer.Typer, name: str, package: str) -> None:
    """Adds a tool's command, which its package registers as an entry point in the group TOOLS.

    If the package is missing, the command is hidden, and its error names the package.
    """
    for point in importlib.metadata.entry_points(group=TOOLS, name=name):
        point.load()(commands)
        return

    @commands.command(name, hidden=True, context_settings=_FORWARDED)
    def report_missing(context: typer.Context) -> None:
        raise ConfigurationError(
            f"penstock {name} requires the package {package}, which is not installed"
        )


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {importlib.metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve models behind an HTTPS API, over Pub/Sub."""
    if context.invoked_subcommand in OF_OPERATORS:
        _join_running_stack(has_keys_command=context.invoked_subcommand in OF_KEYS)


def _join_running_stack(*, has_keys_command: bool) -> None:
    """Uses the settings of the stack running in this folder, unless other settings are made."""
    from infra.local.running_stack import PLACES, find_running_stack
    from shared.settings import list_given_settings

    if PLACES & os.environ.keys():
        return
    stack = find_running_stack(STATE_DIR)
    if stack is None:
        return
    typer.echo(f"penstock: using the stack that runs in {STATE_DIR.resolve()}", err=True)
    if has_keys_command and not stack.needs_keys and "PENSTOCK_KEYS_URL" not in os.environ:
        url = stack.settings["PENSTOCK_KEYS_URL"]
        typer.echo(
            "penstock: it serves requests without keys; to require them, start it with "
            f"PENSTOCK_KEYS_URL={url}",
            err=True,
        )
    os.environ.update(stack.settings | list_given_settings())


def main() -> None:
    """Runs one command and exits with its status."""
    exempt_loopback_from_proxies()
    signal.signal(signal.SIGTERM, _interrupt)
    app(prog_name="penstock")


@app.command()
def up(
    api_port: Port = Ports.api,
    pubsub_port: Port = Ports.pubsub,
    bigquery_port: Port = Ports.bigquery,
    redis_port: Port = Ports.redis,
    functions_port: Port = Ports.functions,
    metrics_port: Annotated[
        int, typer.Option(metavar="PORT", help="API metrics port")
    ] = Ports.metrics,
    health_port: Annotated[int, typer.Option(metavar="PORT", help="first worker's port")] = 8091,
    rabbitmq_port: Port = Ports.rabbitmq,
    row_archive_port: Port = Ports.row_archive,
    broker: BrokerOption = "pubsub",
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="API listen address; API keys are required unless it is a loopback address",
        ),
    ] = "",
    tls_cert: Annotated[str, typer.Option(metavar="FILE", help="TLS certificate of the API")] = "",
    tls_key: Annotated[str, typer.Option(metavar="FILE", help="key of --tls-cert")] = "",
    startup_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            callback=check_amount,
            help="overrides startup_s of every model in the catalog",
        ),
    ] = 0,
) -> None:
    """Start the whole pipeline here and keep it up. Restarts processes that die."""
    from infra.local.up import stay_up
    from shared.settings import list_given_settings

    health = range(health_port, health_port + 100)
    ports = Ports(
        api_port,
        pubsub_port,
        bigquery_port,
        redis_port,
        health,
        functions_port,
        metrics_port,
        rabbitmq_port,
        row_archive_port,
    )
    named = {
        "PENSTOCK_HOST": host,
        "PENSTOCK_TLS_CERT": str(Path(tls_cert).resolve()) if tls_cert else "",
        "PENSTOCK_TLS_KEY": str(Path(tls_key).resolve()) if tls_key else "",
        "PENSTOCK_STARTUP_S": str(startup_s) if startup_s else "",
    }
    settings = list_given_settings() | {name: value for name, value in named.items() if value}
    raise typer.Exit(stay_up(STATE_DIR, ports, settings, broker))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="prompt of the generated image")] = "",
    edit_prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="prompt for editing that image")
    ] = "",
    broker: BrokerOption = "pubsub",
) -> None:
    """Start everything, send real input, show the results, stop."""
    from infra.local.demo import EDIT_PROMPT, PROMPT, run_demo

    result = run_demo(STATE_DIR / "demo", prompt or PROMPT, edit_prompt or EDIT_PROMPT, broker)
    raise typer.Exit(result)


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="check a deployed cluster, with kubectl and gcloud")
    ] = False,
    context: Annotated[
        str, typer.Option(metavar="NAME", help="kubectl context (default: the current one)")
    ] = "",
    namespace: Annotated[str, typer.Option(metavar="NAME", help="workers' namespace")] = "penstock",
    ack_deadline_s: Annotated[
        int, typer.Option(min=10, max=600, help="delivery.ack_deadline_s in Terraform")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Find missing software and unreachable services, and suggest fixes."""
    from infra.local.doctor import examine, report

    if not cluster:
        raise typer.Exit(report(examine(), as_json=as_json))
    from infra.cli.cluster_doctor import ClusterDoctor, Kubectl
    from shared.models.catalog_file import read_catalog
    from shared.settings import Settings, read_settings

    own = read_settings(Settings)
    kubectl, catalog = Kubectl(namespace, context), read_catalog(own.models_file)
    doctor = ClusterDoctor(kubectl, catalog, own, ack_deadline_s)
    raise typer.Exit(report(doctor.findings(), as_json=as_json))


@app.command()
def kill(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="worker, worker-MODEL, api, redis, …")
    ],
) -> None:
    """Kill a process in the stack that runs here, as a crash would. It is restarted."""
    from infra.local.running_stack import find_running_stack

    stack = find_running_stack(STATE_DIR)
    if stack is None:
        raise ConfigurationError(f"penstock up is not running in {STATE_DIR.resolve()}")
    names = [
        process for process in stack.processes if process == name or process.startswith(f"{name}-")
    ]
    if not names:
        raise BadInput(
            f"name: there is no process {name!r}; choose one of {', '.join(stack.processes)}"
        )
    chosen = name if name in names else names[0]
    pid = stack.processes[chosen]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError as error:
        raise BadInput(f"name: {chosen}, process {pid}, has just exited") from error
    typer.echo(f"killed {chosen}, process {pid}")


add_tool(app, "monitoring", "penstock-monitoring")


@app.command(context_settings=_FORWARDED)
def pubsub(context: typer.Context) -> None:
    """Serve only the embedded Pub/Sub (--host --port --rest-port --data-dir)."""
    _run_program("pubsub-emulator", context.args)


@app.command(context_settings=_FORWARDED)
def bigquery(context: typer.Context) -> None:
    """Serve only the embedded BigQuery (--host --port --data-dir)."""
    _run_program("bigquery-emulator", context.args)


@app.command()
def provision(
    functions_url: Annotated[
        str, typer.Option(metavar="URL", help="push endpoint for dead letters and webhooks")
    ] = "",
    wait_s: Annotated[
        float, typer.Option(min=0, callback=check_amount, help="seconds to wait for the servers")
    ] = 120,
) -> None:
    """Create topics, subscriptions, and tables on embedded servers."""
    from infra.local.provision_servers import provision_servers
    from shared.settings import ApiSettings, read_settings

    provision_servers(read_settings(ApiSettings), functions_url, wait_s, typer.echo)


@app.command()
def api() -> None:
    """Serve only the API, with the PENSTOCK_* settings."""
    from api.__main__ import main as serve

    raise typer.Exit(serve())


@app.command()
def batches() -> None:
    """Run only the batch runner, with the API's PENSTOCK_* settings."""
    from api.batch_runner.__main__ import main as serve

    raise typer.Exit(serve())


@app.command()
def worker(
    model: Annotated[str, typer.Option(metavar="MODEL", help="the catalog entry to serve")],
) -> None:
    """Run only one worker, with the PENSTOCK_* settings."""
    os.environ["PENSTOCK_MODEL"] = model
    from workers.__main__ import main as serve

    raise typer.Exit(serve())


app.command()(optimize)
app.add_typer(weights, name="weights")
app.add_typer(budgets, name="budgets")
app.add_typer(models, name="models")
app.command()(init)
app.command()(predict)


@app.command(context_settings=_FORWARDED)
def bench(context: typer.Context) -> None:
    """Run benchmarks of the pipeline in a checkout (--check, --quick)."""
    if not Path("bench/__main__.py").is_file():
        raise ConfigurationError(
            "this folder has no benchmarks; run this command from the root of a checkout"
        )
    sys.path.insert(0, str(Path.cwd()))
    raise typer.Exit(importlib.import_module("bench.__main__").main(context.args))


# `penstock --help` lists commands in the order in which they are added.
add_tool(app, "deploy", "penstock-planning")
add_tool(app, "simulate", "penstock-planning")
app.command()(report)
app.command()(invoice)
add_tool(app, "load", "penstock-load")
app.command()(run_daily)


def _run_program(name: str, words: Sequence[str]) -> NoReturn:
    """Runs another distribution's program, which declares its own options, in this process.

    Raises:
        ConfigurationError: the distribution `penstock-NAME` is not installed.
    """
    for point in importlib.metadata.entry_points(group="console_scripts", name=name):
        raise typer.Exit(point.load()(words))
    raise ConfigurationError(
        f"{name} is part of the package penstock-{name}, which is not installed"
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
