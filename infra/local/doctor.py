"""`penstock doctor`: checks this machine and the configured endpoints, and suggests fixes.

It also checks that the reply inboxes exist as configured in the API's settings.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.local.ports import Ports
from infra.local.process import answers, listens
from infra.local.redis_server import find_redis_server
from infra.python_build import OLDEST, is_optimized
from infra.reports.tables import check_bigquery
from shared.broker.transport import WEBHOOKS_SUBSCRIPTION_ID, direct_id, slot_subscription_id
from shared.brokers import admin_of
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, Settings, read_settings
from shared.stores.objects import ObjectStore
from shared.stores.redis_client import find_eviction_fault

FREE_DISK_BYTES = 2 * 1024**3
FREE_MEMORY_BYTES = 2 * 1024**3
"""Minimum free memory. The stack with the bundled models takes about 1.5 GB."""
REACH_LIMIT_S = 5.0
_PLACES = {
    "project",
    "broker",
    "pubsub_endpoint",
    "bigquery_endpoint",
    "redis_url",
    "records_url",
    "objects_url",
    "rows_url",
}
Try = tuple[str, str, Callable[[], Coroutine[Any, Any, None]]]
"""Variable that configures an endpoint, the endpoint, and a function that tries to reach it."""
EXTRAS = ("api", "worker", "functions", "optimize", "local", "simulation", "dev")
"""Extras installed by `make setup`. The `gpu` extra is for machines with a GPU."""
INSTALL = "make setup"
DISTRIBUTIONS = ("penstock", "penstock-bigquery-emulator", "penstock-pubsub-emulator")
"""Distributions built from this repository."""

_PIN = re.compile(
    r"(?P<name>[\w.-]+)(\[[\w,]+\])?==(?P<version>[^;\s]+)(.*extra == ['\"](?P<extra>\w+))?"
)

_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*= *['\"](?P<version>[^'\"]+)", re.MULTILINE)
"""The CUDA version in torch/version.py. None for a CPU build."""


async def check_inboxes(settings: ApiSettings, limit_s: float) -> None:
    """Checks the subscriptions of every inbox that an instance might lease.

    Raises:
        Unavailable: some subscriptions are missing. An instance that leases such an inbox never
            becomes ready.
        PenstockError: see the admin's calls.
    """
    pool = range(settings.inbox_first, settings.inbox_first + settings.inbox_pool)
    wanted = [
        name
        for inbox in map(str, pool)
        for name in (
            direct_id(inbox),
            *(slot_subscription_id(inbox, slot) for slot in range(settings.reply_slots)),
        )
    ]
    async with admin_of(settings, timeout_s=limit_s) as admin:
        missing = await admin.missing_subscriptions(wanted)
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise Unavailable(
            f"of {len(wanted)} subscriptions, {missing[0]}{others} are missing; create them with "
            "penstock up or terraform apply"
        )


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check, which passed if `fix` is empty."""

    what: str
    facts: str
    fix: str = ""


def report(diagnoses: Iterable[Diagnosis], *, as_json: bool = False) -> int:
    """Prints every finding. Returns 1 if any finding needs a fix."""
    missing, findings = 0, list[dict[str, str]]()
    for finding in diagnoses:
        missing += bool(finding.fix)
        if as_json:
            findings.append(asdict(finding))
        else:
            _show(finding)
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        print(f"\n{missing} to fix" if missing else "\nnothing is missing")
    return 1 if missing else 0


def _show(finding: Diagnosis) -> None:
    verdict, color = ("MISS", "red") if finding.fix else ("ok", "green")
    # Colors are omitted if the output is not a terminal.
    typer.echo(f"{typer.style(f'{verdict:<5}', fg=color)} {finding.what:<12} {finding.facts}")
    if finding.fix:
        typer.echo(f"{'':<18} fix: {finding.fix}")


def examine() -> Iterator[Diagnosis]:
    """Yields every finding about this machine."""
    yield _python()
    yield _packages()
    yield _torch_build()
    yield _redis_server()
    yield _ports()
    yield _disk()
    yield _memory()
    try:
        settings = read_settings(Settings)
    except ConfigurationError as error:
        yield Diagnosis("settings", error.message, "correct the variable, or unset it")
        return
    yield from _catalog(settings)
    yield from _endpoints(settings)


def _python() -> Diagnosis:
    facts = ".".join(map(str, sys.version_info[:3]))
    if not is_optimized():
        # Only a note, because Python works either way.
        facts += (
            ", built without --enable-optimizations: the API and workers use about 15 % "
            "more CPU time than with Python from Docker, Debian or uv"
        )
    return Diagnosis(
        "Python", facts, "" if sys.version_info >= OLDEST else "install Python 3.11 or later"
    )


def _packages() -> Diagnosis:
    try:
        requirements = [
            requirement
            for name in DISTRIBUTIONS
            for requirement in importlib.metadata.requires(name) or []
        ]
    except importlib.metadata.PackageNotFoundError as error:
        return Diagnosis("packages", f"{error.name} is not installed", INSTALL)
    pins = [pin for pin in map(_PIN.match, requirements) if pin and pin["extra"] in (None, *EXTRAS)]
    wrong = sorted(
        {pin["name"] for pin in pins if _find_installed_version(pin["name"]) != pin["version"]}
    )
    if wrong:
        return Diagnosis(
            "packages", f"missing or at a different version: {', '.join(wrong)}", INSTALL
        )
    return Diagnosis("packages", f"{len(pins)} at their pinned versions")


def _find_installed_version(name: str) -> str | None:
    """Returns the installed version without its build suffix (`+cpu`)."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> Diagnosis:
    """Reports which platform the installed torch was built for, without importing it."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return Diagnosis("torch", "not installed", INSTALL)
    try:
        facts = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError as error:
        return Diagnosis("torch", f"{distribution.version}, but incomplete: {error}", INSTALL)
    cuda = _CUDA_VERSION.search(facts)
    build = f"for CUDA {cuda['version']}" if cuda else "for CPUs"
    return Diagnosis("torch", f"{distribution.version}, built {build}")


def _redis_server() -> Diagnosis:
    try:
        return Diagnosis("Redis server", str(find_redis_server()))
    except ConfigurationError as error:
        return Diagnosis("Redis server", error.message, f"install redis-server, or run {INSTALL}")


def _ports() -> Diagnosis:
    ports = Ports()
    servers = ports.pubsub, ports.bigquery, ports.redis
    wanted = (ports.api, *servers, ports.functions, ports.metrics)
    in_use = [port for port in wanted if listens(port)]
    if ports.api in in_use and answers(ports.api, "/readyz"):
        return Diagnosis("ports", f"a Penstock API is ready on port {ports.api}")
    if in_use:
        fix = "stop the program that is listening there or choose other ports: penstock up --help"
        return Diagnosis("ports", f"taken: {', '.join(map(str, in_use))}", fix)
    return Diagnosis("ports", f"{', '.join(map(str, wanted))} are free")


def _disk() -> Diagnosis:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    fix = f"free {FREE_DISK_BYTES / 1e9:.0f} GB in {Path.cwd()}"
    facts = f"{free_bytes / 1e9:.0f} GB free"
    return Diagnosis("disk", facts, "" if free_bytes >= FREE_DISK_BYTES else fix)


def _memory() -> Diagnosis:
    try:
        # Includes caches that Linux can reclaim. Without them, free memory looks low on any busy
        # machine.
        available = re.search(
            r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")
        )
    except OSError:
        available = None
    if available is None:
        return Diagnosis("memory", "not checked, because this system has no /proc/meminfo")
    free_bytes = int(available[1]) * 1024
    fix = (
        ""
        if free_bytes >= FREE_MEMORY_BYTES
        else ("stop other programs: the stack uses about 2 GB")
    )
    return Diagnosis("memory", f"{free_bytes / 1e9:.1f} GB available", fix)


def _catalog(settings: Settings) -> Iterator[Diagnosis]:
    try:
        catalog = read_catalog(settings.models_file)
    except ConfigurationError as error:
        yield Diagnosis(
            "catalog", error.message, f"correct {settings.models_file}, or set PENSTOCK_MODELS_FILE"
        )
        return
    yield Diagnosis(
        "catalog", f"{settings.models_file}: {', '.join(model.name for model in catalog.served)}"
    )
    yield from _sources(catalog)


def _sources(catalog: Catalog) -> Iterator[Diagnosis]:
    """Checks models whose files must be on this machine before a worker starts."""
    sources = [source for model in catalog.deployed for source in model.sources.items()]
    for name, (source, _) in sources:
        kind, _, place = source.partition(":")
        if kind == "local" and not Path(place).expanduser().exists():
            facts = f"{name}: folder {place} does not exist"
            yield Diagnosis("model", facts, "add the model's files")
        if kind == "package" and importlib.util.find_spec(place.partition("/")[0]) is None:
            facts = f"{name}: package {place.partition('/')[0]} is not installed"
            yield Diagnosis("model", facts, INSTALL)


def _endpoints(settings: Settings) -> Iterator[Diagnosis]:
    """Tries to reach each configured service.

    `penstock up` starts its own server if none is configured.
    """
    if not settings.model_fields_set & _PLACES:
        yield Diagnosis("endpoints", "none configured: penstock up starts its own")
        return
    tries: dict[str, Try] = {
        **_broker(settings),
        "BigQuery": (
            "PENSTOCK_BIGQUERY_ENDPOINT",
            settings.bigquery_endpoint or "Google's own",
            partial(asyncio.to_thread, check_bigquery, settings, REACH_LIMIT_S - 1),
        ),
        "Redis": _redis("PENSTOCK_REDIS_URL", settings.redis_url, not settings.records_url),
        "objects": _objects("PENSTOCK_OBJECTS_URL", settings.objects_url),
    }
    if settings.records_url:
        tries["records"] = _redis("PENSTOCK_RECORDS_URL", settings.records_url, True)
    if settings.rows_url:
        tries["rows"] = _objects("PENSTOCK_ROWS_URL", settings.rows_url, "rows_url")
    try:
        tries |= _inboxes(read_settings(ApiSettings))
    except ConfigurationError as error:
        yield Diagnosis("settings", error.message, "correct the variable, or unset it")
    for service, (variable, place, reach) in tries.items():
        try:
            asyncio.run(_within_limit(reach()))
        except ConfigurationError as error:
            yield Diagnosis(service, f"{place}: {error.message}", f"configure it or set {variable}")
        except PenstockError as error:
            yield Diagnosis(
                service,
                f"{place}: {error.message}",
                f"start it (penstock up) or correct {variable}",
            )
        else:
            yield Diagnosis(service, f"{place} answers")


def _broker(settings: Settings) -> dict[str, Try]:
    reach = partial(_reach_broker, settings)
    if settings.broker:
        return {"RabbitMQ": ("PENSTOCK_BROKER", _without_password(settings.broker), reach)}
    place = settings.pubsub_endpoint or "Google's own"
    return {"Pub/Sub": ("PENSTOCK_PUBSUB_ENDPOINT", place, reach)}


def _inboxes(settings: ApiSettings) -> dict[str, Try]:
    if not settings.inbox_pool:
        return {}
    place = f"the pool of {settings.inbox_pool} inboxes, starting at {settings.inbox_first}"
    check = partial(check_inboxes, settings, REACH_LIMIT_S - 1)
    return {"inboxes": ("PENSTOCK_INBOX_POOL", place, check)}


def _redis(variable: str, url: str, has_records: bool) -> Try:
    return variable, _without_password(url), partial(_reach_redis, url, has_records)


def _objects(variable: str, url: str, setting: str = "objects_url") -> Try:
    return variable, url, lambda: ObjectStore(url, setting=setting).check()


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)


async def _within_limit(reaching: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(REACH_LIMIT_S):
            await reaching
    except TimeoutError as error:
        raise Unavailable(f"no response within {REACH_LIMIT_S:g} s") from error


async def _reach_broker(settings: Settings) -> None:
    async with admin_of(settings, timeout_s=REACH_LIMIT_S - 1) as admin:
        await admin.subscription_exists(WEBHOOKS_SUBSCRIPTION_ID)


async def _reach_redis(url: str, has_records: bool) -> None:
    try:
        async with Redis.from_url(url, socket_timeout=REACH_LIMIT_S) as client:
            await client.ping()
            if has_records and (fault := await find_eviction_fault(client)):
                raise ConfigurationError(fault)
    except (RedisError, OSError, ValueError) as error:
        raise Unavailable(str(error)) from error
