"""The whole pipeline on one machine, as real processes.

The code is the same as in the cloud; only endpoints, set by environment variables, differ. It is
used by `penstock up`, `penstock demo`, and the end-to-end tests. The first start creates persistent
signing keys for the API and functions, and builds any missing optimized graphs while everything
else starts.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, Self

from infra.local.ports import Ports
from infra.local.process import Process, answers, listens
from infra.local.provision_servers import provision_broker
from infra.local.stack_processes import LOG_FOLDER, StackProcesses
from infra.local.supervision import PROGRESS_S, SupervisedPart, progress_of
from infra.reports.tables import create_tables
from shared.errors import ConfigurationError, Unavailable
from shared.models.catalog import Catalog, Model
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, WorkerSettings, read_settings

WEBHOOK_KEY_BYTES = 32

MAKE_LIMIT_S = 180.0
LOOSE_COSINE = 0.999
"""INT8 graphs are built only for models whose entry tolerates a cosine similarity below this."""

SERVER_LIMIT_S = 60.0
PREPARE_LIMIT_S = 1020.0
"""Time for a worker to download weights and benchmark backends, not counting its models'
`startup_s`.
"""
API_LIMIT_S = 120.0
FUNCTIONS_LIMIT_S = 120.0
TEMP_DIR_LONGEST = 60

Broker = Literal["pubsub", "rabbitmq"]
REPLACED_BY = {
    "redis": "PENSTOCK_REDIS_URL",
    "pubsub": "PENSTOCK_PUBSUB_ENDPOINT",
    "rabbitmq": "PENSTOCK_BROKER",
    "bigquery": "PENSTOCK_BIGQUERY_ENDPOINT",
}
"""For each server, the setting that names its replacement."""


def load_secrets(state_dir: Path) -> dict[str, str]:
    """Returns this state folder's secrets, keyed by setting.

    The secrets stay the same across starts.

    Args:
        state_dir: folder that contains `secrets.json`, which only its owner may read.

    Raises:
        ConfigurationError: the file is damaged.
    """
    path = state_dir / "secrets.json"
    if not path.exists():
        key = base64.b64encode(secrets.token_bytes(WEBHOOK_KEY_BYTES)).decode()
        processes = {
            "PENSTOCK_SECRET": secrets.token_hex(32),
            "PENSTOCK_WEBHOOK_SECRETS": f"whsec_{key}",
        }
        state_dir.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(processes, file)
        part.rename(path)
    try:
        saved_secrets: dict[str, str] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is damaged; delete it to create new secrets: {error}"
        ) from error
    return saved_secrets


def choose_graphs(model: Model) -> str:
    """Returns the optimized graphs that a worker may use, by their names in `penstock optimize`."""
    if not model.definition.runs_graphs or model.backend == "torch":
        return ""
    graphs = ["fp32"]
    if model.precision == "int8" or (
        model.precision == "auto" and model.tolerance.cosine < LOOSE_COSINE
    ):
        graphs += ["int8", "int8-static"]
    if model.precision in ("auto", "fp16") and shutil.which("nvidia-smi"):
        graphs.append("fp16")
    return ",".join(graphs)


def await_graphs(
    makers: Mapping[str, Process], report: Callable[[str, str], None]
) -> Iterator[str]:
    """Yields each model's name when its graph builder finishes.

    A model without graphs is served by torch.

    Args:
        report: receives a word and details for each builder that is slow or fails.
    """
    for name, maker in makers.items():
        if maker.is_running:  # false if the graphs exist, which takes half a second to check
            facts = f"{name}: checking for optimized graphs, which are built at the first start"
            report("graphs", facts)
        began_s = time.monotonic()
        try:
            while maker.is_running and time.monotonic() - began_s < MAKE_LIMIT_S:
                with suppress(Unavailable):
                    maker.wait_done(PROGRESS_S)
                if maker.is_running:
                    report("graphs", f"{name}: {time.monotonic() - began_s:.0f} s so far")
            maker.wait_done(0)
        except Unavailable as error:
            maker.stop()
            report("without", f"optimized graphs: {error.message}")
        yield name


class Stack:
    """The running pipeline.

    Entering the context starts all parts and waits for them; leaving it stops them.

    `without_waiting` is an alternative way to enter it that does not wait for the workers.

    Args:
        settings: `PENSTOCK_*` variables for every process, which override the stack's own. A server
            whose REPLACED_BY variable is in these settings is not started; the server named there
            is used instead.
        keep_messages: true if Pub/Sub keeps its messages in the state folder, across restarts and
            crashes. RabbitMQ always does.
        broker: `rabbitmq` starts RabbitMQ instead of the embedded Pub/Sub.

    Raises:
        ConfigurationError: a port is in use, or the catalog or a setting is invalid. Unavailable: a
            part exited or was not ready in time. The message contains the end of the part's log.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        ports: Ports,
        settings: Mapping[str, str] | None = None,
        keep_messages: bool = False,
        broker: Broker = "pubsub",
        say: Callable[[str], None] = print,
    ) -> None:
        self.state_dir = state_dir.resolve()
        self.log_dir = self.state_dir / LOG_FOLDER
        self.ports = ports
        self.processes: dict[str, Process] = {}
        """The processes, keyed by name: redis, pubsub or rabbitmq, bigquery, worker-<model>, api,
        batches, functions, row-archive.
        """
        self.models: Sequence[Model] = ()
        """The models that are served, once the stack has been started."""
        self.workers: dict[str, str] = {}
        """Names of the processes that serve each model, keyed by model name."""
        self._given_settings = dict(settings or {})
        self.broker: Broker = broker
        self._make = StackProcesses(
            self.state_dir,
            ports,
            self._given_settings,
            keep_messages=keep_messages,
            has_rabbitmq="rabbitmq" in self._own_servers(),
        )
        self._say = say
        self._began_s = 0.0
        self._undo = ExitStack()
        self._sockets: dict[str, str] = {}
        self._checks: dict[str, tuple[Callable[[], bool], float]] = {}
        """Keyed by process name: a function that returns whether the process is ready, and how many
        seconds it may take to become ready.
        """
        self._were_ready: set[str] = set()

    @property
    def api_url(self) -> str:
        host = f"[{self._api_host}]" if ":" in self._api_host else self._api_host
        return f"{'https' if self._has_tls else 'http'}://{host}:{self.ports.api}"

    @property
    def _api_host(self) -> str:
        host = self.environment.get("PENSTOCK_HOST", "127.0.0.1")
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)

    @property
    def _has_tls(self) -> bool:
        return bool(self.environment.get("PENSTOCK_TLS_CERT"))

    @property
    def functions_url(self) -> str:
        """The URL of the functions.

        Empty with Google's broker, which can't push messages to this machine.
        """
        has_functions = self.settings.broker or self.settings.pubsub_endpoint
        return f"http://127.0.0.1:{self.ports.functions}" if has_functions else ""

    @property
    def environment(self) -> dict[str, str]:
        """The settings shared by all of this stack's processes, for starting another process."""
        return self._make.environment

    @property
    def settings(self) -> ApiSettings:
        return read_settings(ApiSettings, **self._fields)

    @property
    def _fields(self) -> dict[str, str]:
        return {
            name.removeprefix("PENSTOCK_").lower(): value
            for name, value in self.environment.items()
        }

    def __enter__(self) -> Self:
        self._open()
        try:
            for name in dict.fromkeys(self.workers.values()):
                self._await(name, "warm")
        except BaseException:
            self._close()
            raise
        return self

    @contextmanager
    def without_waiting(self) -> Iterator[Self]:
        """Starts all parts and waits for all of them except the workers. Leaving stops them.

        A supervisor of `parts` reports each worker that becomes ready or fails.
        """
        self._open()
        try:
            yield self
        finally:
            self._close()

    def _open(self) -> None:
        self._began_s = time.monotonic()
        with ExitStack() as undo:
            undo.callback(self.report, "stopped", "")
            settings = self.settings
            catalog = read_catalog(settings.models_file)
            self.models = catalog.models
            self._check_ports()
            health = self._free_health_ports(len(catalog.worker_groups))
            makers = self._start_makers(undo, catalog)
            self._start_servers(undo)
            provision_broker(settings, catalog, self.functions_url)
            self.report("made", "topics and subscriptions")
            create_tables(settings)
            self.report("made", f"dataset {settings.dataset}")
            self._start_pipeline(undo, catalog, health, makers)
            self._undo = undo.pop_all()

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        with _ignore_interrupts():
            self._undo.close()

    @property
    def parts(self) -> list[SupervisedPart]:
        """The processes to supervise, once all of them have been started."""
        always: tuple[Callable[[], bool], float] = (lambda: True, 0.0)
        workers = set(self.workers.values())
        return [
            SupervisedPart(
                process,
                *self._checks.get(name, always),
                was_ready=name in self._were_ready or name not in self._checks,
                is_optional=name in workers,
            )
            for name, process in self.processes.items()
        ]

    def report(self, word: str, facts: str) -> None:
        self._say(f"{time.monotonic() - self._began_s:6.1f} s  {word:<8}{facts}".rstrip())

    def _check_ports(self) -> None:
        """Checks the ports up front. Later, a port conflict would show up only in some log."""
        wanted = {"metrics of the API": self.ports.metrics}
        wanted |= {name: getattr(self.ports, name) for name in self._own_servers()}
        wanted |= {"functions": self.ports.functions} if self.functions_url else {}
        wanted |= {"row archive": self.ports.row_archive} if self.settings.rows_url else {}
        in_use = {part: port for part, port in wanted.items() if listens(port)}
        if listens(self.ports.api, self._api_host):
            in_use["API"] = self.ports.api
        if in_use:
            ports = ", ".join(f"port {port} ({part})" for part, port in in_use.items())
            raise ConfigurationError(
                f"{ports} {('is' if len(in_use) == 1 else 'are')} already in use; stop the "
                "programs using them or choose other ports (see penstock up --help)"
            )

    def _free_health_ports(self, workers: int) -> list[int]:
        """Returns a free port for each worker.

        Only the stack needs to know these ports, so ports that are in use are skipped.
        """
        free = list(islice((port for port in self.ports.health if not listens(port)), workers))
        if len(free) < workers:
            raise ConfigurationError(
                f"{workers} workers need {workers} health ports, but only {len(free)} of the "
                f"{len(self.ports.health)} starting at {self.ports.health[0]} are free; choose "
                "other ports (see penstock up --help)"
            )
        return free

    def _own_servers(self) -> list[str]:
        other = {"pubsub": "rabbitmq", "rabbitmq": "pubsub"}[self.broker]
        if "PENSTOCK_BROKER" in self._given_settings:
            other = "pubsub"
        return [
            server
            for server, variable in REPLACED_BY.items()
            if variable not in self._given_settings and server != other
        ]

    def _start_servers(self, undo: ExitStack) -> None:
        # A socket path can be at most 107 bytes long, so the state folder's own path may be too
        # long.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) < TEMP_DIR_LONGEST else "/tmp"
        socket_dir = Path(
            undo.enter_context(tempfile.TemporaryDirectory(prefix="penstock-", dir=place))
        )
        own = self._own_servers()
        for name in own:
            self._start(undo, self._make.server(name, socket_dir))
        self._sockets = {
            REPLACED_BY[name]: url
            for name, url in self._make.socket_urls(socket_dir).items()
            if name in own
        }
        for name in own:
            port = getattr(self.ports, name)
            self._checks[name] = (partial(listens, port), SERVER_LIMIT_S)
            self._await(name, f"127.0.0.1:{port}")

    def _start_makers(self, undo: ExitStack, catalog: Catalog) -> dict[str, Process]:
        """Starts building missing optimized graphs. Returns the builders, keyed by model name."""
        makers = {}
        for model in catalog.deployed:
            if graphs := choose_graphs(model):
                command = ["infra.cli.main", "optimize", model.name, "--variants", graphs]
                maker = self._make.module(f"optimize-{model.name}", command)
                makers[model.name] = undo.enter_context(maker)
        return makers

    def _start_pipeline(
        self,
        undo: ExitStack,
        catalog: Catalog,
        health: Sequence[int],
        makers: Mapping[str, Process],
    ) -> None:
        """Starts the API, the functions, and the workers, each as early as possible.

        A worker whose model has no graphs yet starts last. It benchmarks backends on this machine,
        so it waits until nothing else is starting.
        """
        workers = self._make_workers(catalog, health)
        for worker in workers.values():
            undo.callback(worker.stop)
        # Runs after the API has stopped and before the first worker is awaited, so that all workers
        # stop at the same time.
        for worker in workers.values():
            undo.callback(worker.ask_to_stop)
        self.processes |= {worker.name: worker for worker in workers.values()}
        self.workers |= {
            model.name: workers[group.name].name
            for group in catalog.worker_groups
            for model in group.models
        }
        waiting = {
            group.name: {model.name for model in group.models} & makers.keys()
            for group in catalog.worker_groups
        }
        for name, missing in waiting.items():
            if not missing:
                workers[name].start()
        signing = {
            name: value
            for name, value in load_secrets(self.state_dir).items()
            if name not in self._given_settings
        }
        # Webhook receivers on this machine are allowed.
        signing |= {
            "PENSTOCK_WEBHOOKS_PRIVATE": self._given_settings.get("PENSTOCK_WEBHOOKS_PRIVATE", "1")
        }
        self._start(undo, self._make.api(self._sockets | signing))
        self._start(undo, self._make.batches(self._sockets))
        if self.functions_url:
            self._start(undo, self._make.functions(self._sockets | signing))
        if self.settings.rows_url:
            self._start(undo, self._make.row_archive())
        self._await_pipeline()
        for optimized in await_graphs(makers, self.report):
            for name, missing in waiting.items():
                if missing == {optimized}:
                    workers[name].start()
                missing.discard(optimized)

    def _make_workers(self, catalog: Catalog, health: Sequence[int]) -> dict[str, Process]:
        """Returns the workers, keyed by group name, without starting them."""
        override_s = read_settings(WorkerSettings, model="", **self._fields).startup_s
        workers: dict[str, Process] = {}
        for group, port in zip(catalog.worker_groups, health, strict=True):
            worker = self._make.worker(group, port, self._sockets)
            limit_s = PREPARE_LIMIT_S + (override_s or group.startup_s)
            self._checks[worker.name] = (partial(answers, port, "/readyz"), limit_s)
            workers[group.name] = worker
        return workers

    def _await_pipeline(self) -> None:
        api = partial(answers, self.ports.api, "/readyz", host=self._api_host, tls=self._has_tls)
        self._checks["api"] = (api, API_LIMIT_S)
        self._await("api", self.api_url)
        if self.functions_url:
            functions = partial(answers, self.ports.functions, "/readyz")
            self._checks["functions"] = (functions, FUNCTIONS_LIMIT_S)
            self._await("functions", "dead letters, webhooks")
        if self.settings.rows_url:
            archive = partial(answers, self.ports.row_archive, "/metrics")
            self._checks["row-archive"] = (archive, SERVER_LIMIT_S)
            self._await("row-archive", self.settings.rows_url)

    def _start(self, undo: ExitStack, process: Process) -> None:
        self.processes[process.name] = undo.enter_context(process)

    def _await(self, name: str, facts: str) -> None:
        is_ready, limit_s = self._checks[name]
        self.processes[name].wait_ready(self._reporting(name, is_ready), limit_s)
        self._were_ready.add(name)
        self.report("ready", f"{name} · {facts}")

    def _reporting(self, name: str, is_ready: Callable[[], bool]) -> Callable[[], bool]:
        """Returns an `is_ready` that also reports a slow process after 10, 20, 40 s, and so on."""
        began_s = time.monotonic()
        next_s = began_s + PROGRESS_S

        def check() -> bool:
            nonlocal next_s
            if is_ready():
                return True
            if (now_s := time.monotonic()) >= next_s:
                waited_s = now_s - began_s
                self.report("waiting", progress_of(self.processes[name], waited_s))
                next_s = now_s + waited_s
            return False

        return check


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignores interrupts during shutdown, which has its own limits.

    A second Ctrl-C must not leave processes behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
