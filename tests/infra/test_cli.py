import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import redis

from infra.local.redis_server import RedisServer
from infra.reports.tables import create_tables
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.transport import make_inbox
from shared.settings import Settings, read_settings
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def penstock(*words: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    command = [sys.executable, "-m", "infra.cli.main", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT_S
    )


def without(package: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command while `package` can't be imported, as in an image that lacks the package."""
    code = f"import sys; sys.modules[{package!r}] = None; from infra.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
    )


def test_help_names_every_command() -> None:
    reported = penstock("--help")
    assert reported.returncode == 0
    for command in (
        "up",
        "demo",
        "doctor",
        "pubsub",
        "bigquery",
        "api",
        "worker",
        "optimize",
        "models",
        "init",
        "predict",
        "report",
        "load",
    ):
        assert f"\n  {command} " in reported.stdout


def test_help_begins_with_what_a_newcomer_runs() -> None:
    lines = penstock("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["up", "demo", "doctor"]


def test_version_is_that_of_the_distribution() -> None:
    reported = penstock("--version")
    assert (reported.returncode, reported.stdout) == (0, f"penstock {version('penstock')}\n")


@pytest.mark.parametrize("words", [(), ("fly",), ("up", "--speed", "9"), ("worker",)], ids=str)
def test_wrong_words_are_refused(words: tuple[str, ...]) -> None:
    reported = penstock(*words)
    assert reported.returncode == 2
    assert reported.stderr.startswith("Usage: penstock")


def test_command_starts_without_heavy_imports() -> None:
    code = "import sys, infra.cli.main; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not {
        "google.cloud.bigquery",
        "grpc",
        "numpy",
        "openai",
        "pydantic",
        "redis",
        "torch",
    } & set(loaded.split())
    assert not {"api", "workers"} & {name.partition(".")[0] for name in loaded.split()}


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("api", ("api",)),
        ("api", ("budgets", "restore")),
        ("workers", ("worker", "--model", "any")),
        ("workers", ("models", "install", "any")),
    ],
)
def test_command_of_a_package_that_is_not_installed_names_it(
    package: str, words: tuple[str, ...]
) -> None:
    reported = without(package, *words)
    error = f"penstock {words[0]} requires the package {package}, which is not installed\n"
    assert (reported.returncode, reported.stderr) == (1, error)


def test_api_starts_without_workers() -> None:
    reported = without("workers", "api", PENSTOCK_MODELS_FILE="none.yaml")
    error = "penstock api: none.yaml: No such file or directory\n"
    assert (reported.returncode, reported.stderr) == (1, error)


@pytest.mark.parametrize("server", ["pubsub", "bigquery"])
def test_servers_run_alone_until_terminated(server: str) -> None:
    command = [sys.executable, "-m", "infra.cli.main", server, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "listening on 127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_LIMIT_S) == 0


@pytest.mark.parametrize("words", [("deploy", "plan"), ("optimize",)], ids=" ".join)
def test_help_of_a_forwarded_command_has_its_full_name(words: tuple[str, ...]) -> None:
    reported = penstock(*words, "--help")
    assert reported.returncode == 0
    assert reported.stdout.strip().lower().startswith(f"usage: penstock {' '.join(words)} ")
    assert "\033" not in reported.stdout


def test_help_is_quick() -> None:
    began_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert penstock("--help").returncode == 0
    ended_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = ended_s.ru_utime + ended_s.ru_stime - began_s.ru_utime - began_s.ru_stime
    assert took_s < 0.9, "0.3 s on a slow machine; torch alone takes 1.8"


@pytest.mark.parametrize("server", ["pubsub", "bigquery"])
def test_server_has_help_of_its_own(server: str) -> None:
    reported = penstock(server, "--help").stdout
    assert reported.startswith(f"usage: {server}-emulator ")
    assert "--data-dir" in reported


def test_worker_of_an_unknown_model_says_so() -> None:
    reported = penstock("worker", "--model", "none")
    assert reported.returncode > 0
    assert "'none' does not exist" in reported.stderr


def test_optimize_has_help_of_its_own() -> None:
    assert "--prune-heads" in penstock("optimize", "--help").stdout


def test_optimize_of_an_unknown_model_says_so() -> None:
    reported = penstock("optimize", "none", "--variants", "fp32")
    assert reported.returncode == 1
    assert "penstock optimize: model 'none' does not exist" in reported.stderr


def test_api_with_a_wrong_setting_says_so() -> None:
    reported = penstock("api", PENSTOCK_PORT="http")
    assert reported.returncode > 0
    assert "PENSTOCK_PORT" in reported.stderr


def test_up_with_a_wrong_catalog_says_so(tmp_path: Path) -> None:
    reported = penstock("up", cwd=tmp_path)
    assert (reported.returncode, reported.stderr) == (
        1,
        "penstock: models.yaml: No such file or directory\n",
    )


def test_reports_are_listed() -> None:
    assert "\n  usage " in penstock("report").stdout


def test_reports_are_listed_as_json() -> None:
    listed = json.loads(penstock("report", "--json").stdout)
    assert {"report", "owner", "for", "shows"} == set(listed[0])
    assert "usage" in [row["report"] for row in listed]


def test_unknown_report_is_refused() -> None:
    reported = penstock("report", "weather")
    assert reported.returncode == 1
    assert reported.stderr.startswith("penstock: report 'weather' does not exist; use one of ")


def test_report_out_of_reach_says_so() -> None:
    reported = penstock("report", "usage", PENSTOCK_BIGQUERY_ENDPOINT="http://127.0.0.1:9")
    assert reported.returncode == 1
    assert reported.stderr.startswith("penstock: BigQuery: ")
    assert "Traceback" not in reported.stderr


def test_report_runs_on_an_empty_table(bigquery_endpoint: str) -> None:
    name = "usage"
    create_tables(read_settings(Settings, bigquery_endpoint=bigquery_endpoint, dataset="cli"))
    reported = penstock(
        "report", name, PENSTOCK_BIGQUERY_ENDPOINT=bigquery_endpoint, PENSTOCK_DATASET="cli"
    )
    assert (reported.returncode, reported.stdout[:12]) == (0, "no rows from"), reported.stderr
    reported = penstock(
        "report",
        name,
        "--json",
        PENSTOCK_BIGQUERY_ENDPOINT=bigquery_endpoint,
        PENSTOCK_DATASET="cli",
    )
    assert (reported.returncode, json.loads(reported.stdout)) == (0, [])


def test_doctor_reaches_what_the_settings_name(
    tmp_path: Path, redis_url: str, pubsub_endpoint: str, bigquery_endpoint: str
) -> None:
    create_tables(read_settings(Settings, bigquery_endpoint=bigquery_endpoint, dataset="cli"))
    reported = penstock(
        "doctor",
        PENSTOCK_REDIS_URL=redis_url,
        PENSTOCK_PUBSUB_ENDPOINT=pubsub_endpoint,
        PENSTOCK_BIGQUERY_ENDPOINT=bigquery_endpoint,
        PENSTOCK_DATASET="cli",
        PENSTOCK_OBJECTS_URL=f"file://{tmp_path}",
    )
    for place in (redis_url, pubsub_endpoint, bigquery_endpoint, f"file://{tmp_path}"):
        assert f" {place} answers" in reported.stdout
    assert "at their pinned versions" in reported.stdout
    assert "all-MiniLM-L6-v2" in reported.stdout


def test_doctor_accepts_a_model_that_is_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    models = [
        {"name": name, "task": "text", "source": source, "batch": {"max_tokens": 4096}}
        for name, source in (
            ("writer", f"local:{tmp_path}/model.gguf"),
            ("missing", f"local:{tmp_path}/gone.gguf"),
        )
    ]
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    reported = penstock("doctor", cwd=tmp_path, PENSTOCK_MODELS_FILE=str(file))
    assert "writer: folder" not in reported.stdout
    assert f"missing: folder {tmp_path}/gone.gguf does not exist" in reported.stdout


def test_doctor_refuses_a_redis_that_evicts_records(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        reported = penstock("doctor", cwd=tmp_path, PENSTOCK_REDIS_URL=server.url)
    assert f"MISS  Redis        {server.url}: maxmemory-policy allkeys-lru loses" in reported.stdout
    assert "set it to volatile-lru or noeviction" in reported.stdout


def test_doctor_finds_inboxes_that_lack_a_subscription(pubsub_endpoint: str) -> None:
    def doctor() -> str:
        return penstock(
            "doctor",
            PENSTOCK_PUBSUB_ENDPOINT=pubsub_endpoint,
            PENSTOCK_PROJECT="doctor",
            PENSTOCK_INBOX_POOL="2",
            PENSTOCK_REPLY_SLOTS="2",
        ).stdout

    async def make(inbox: str) -> None:
        async with PubSubAdmin("doctor", pubsub_endpoint) as admin:
            await make_inbox(admin, inbox, 2)

    asyncio.run(make("0"))
    reported = doctor()
    assert "MISS  inboxes" in reported
    assert "of 6 subscriptions, inbox.1.direct and 2 others are missing" in reported
    asyncio.run(make("1"))
    assert "ok    inboxes" in doctor()


def test_doctor_names_what_is_missing_and_the_fix(tmp_path: Path) -> None:
    models_file = tmp_path / "models.yaml"
    models_file.write_text("models: []")
    reported = penstock(
        "doctor",
        PENSTOCK_MODELS_FILE=str(models_file),
        PENSTOCK_REDIS_URL="redis://:secret@127.0.0.1:9/0",
        PENSTOCK_RECORDS_URL="redis://:secret@127.0.0.1:9/1",
        PENSTOCK_PUBSUB_ENDPOINT="127.0.0.1:9",
        PENSTOCK_BIGQUERY_ENDPOINT="http://127.0.0.1:9",
    )
    assert reported.returncode == 1
    for what in ("catalog", "Pub/Sub", "BigQuery", "Redis  ", "records"):
        assert f"\nMISS  {what}" in reported.stdout
    assert reported.stdout.count("fix: ") >= 5
    assert "or correct PENSTOCK_RECORDS_URL" in reported.stdout
    assert "secret" not in reported.stdout


def test_doctor_names_a_wrong_setting() -> None:
    reported = penstock("doctor", PENSTOCK_LOG_LEVEL="LOUD")
    assert reported.returncode == 1
    assert "MISS  settings     PENSTOCK_LOG_LEVEL" in reported.stdout
    reported = penstock("doctor", "--json", PENSTOCK_LOG_LEVEL="LOUD")
    assert reported.returncode == 1
    findings = {finding["what"]: finding for finding in json.loads(reported.stdout)}
    assert "PENSTOCK_LOG_LEVEL" in findings["settings"]["facts"]
    assert findings["settings"]["fix"]
    assert findings["Python"]["fix"] == ""


def test_doctor_names_a_wrong_setting_of_the_api_beside_the_rest(redis_url: str) -> None:
    reported = penstock(
        "doctor",
        "--json",
        PENSTOCK_REDIS_URL=redis_url,
        PENSTOCK_PUBSUB_ENDPOINT="127.0.0.1:9",
        PENSTOCK_BIGQUERY_ENDPOINT="http://127.0.0.1:9",
        PENSTOCK_INBOX_POOL="many",
    )
    assert reported.returncode == 1
    findings = {finding["what"]: finding for finding in json.loads(reported.stdout)}
    assert "PENSTOCK_INBOX_POOL" in findings["settings"]["facts"]
    assert findings["Redis"]["fix"] == ""


def test_bounds_and_addresses_that_are_no_numbers_or_urls_are_refused() -> None:
    reported = penstock("report", "usage", "--max-gib", "inf")
    assert reported.stderr == "penstock: max-gib: must be a finite number, got inf\n"
    reported = penstock("run-daily", "--function", "http://[bad")
    assert reported.stderr.startswith("penstock: the function is unreachable: ")
    assert reported.stderr.count("\n") == 1
