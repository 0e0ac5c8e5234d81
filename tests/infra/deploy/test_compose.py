"""The Compose file: valid according to the specification's schema, and consistent with images and
code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.row_archive.archive import RowArchiveSettings
from shared.settings import ApiSettings, Settings, WorkerSettings
from tests.infra.deploy.dockerfiles import image, run
from workers.functions.settings import FunctionSettings

FOLDER = Path("infra/compose")
KINDS: dict[str, type[Settings]] = {
    "api": ApiSettings,
    "batches": ApiSettings,
    "provision": ApiSettings,
    "functions": FunctionSettings,
    "worker-gpu": WorkerSettings,
    "worker-cpu": WorkerSettings,
}
SERVERS = {"pubsub", "bigquery", "redis"}
ONCE = {"provision", "proxy-volumes", "keys"}
"""Services that exit on their own."""


def variables(*names: str) -> dict[str, str]:
    """The variables set by these files."""
    lines = [line for name in names for line in (FOLDER / name).read_text("utf-8").splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled(value: Any, given: dict[str, str]) -> Any:
    """The value with Compose's variables substituted."""
    if isinstance(value, dict):
        return {name: filled(one, given) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one, given) for one in value]
    if not isinstance(value, str):
        return value

    def replace(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name not in given:
            assert default is not None, f"{name} is set nowhere"
        return given.get(name, default or "")

    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", replace, value)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = filled(yaml.safe_load(text), variables("images.env", "example.env"))
    return found


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


class _Override(yaml.SafeLoader):
    """Reads a file that Compose merges into another: `!override` replaces, `!reset` removes."""


def _replacement(loader: yaml.SafeLoader, node: yaml.Node) -> dict[Any, Any]:
    assert isinstance(node, yaml.MappingNode)
    return loader.construct_mapping(node, deep=True)


_Override.add_constructor("!reset", lambda loader, node: None)
_Override.add_constructor("!override", _replacement)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges two files as Compose does, to the extent that our files need it."""
    found = dict(base)
    for name, value in over.items():
        if value is None and name in base:
            del found[name]
        elif name in ("services", "volumes", "environment", "healthcheck") or "image" in base.get(
            name, {}
        ):
            found[name] = merged(base.get(name, {}), value)
        elif name == "env_file":
            found[name] = [*base.get(name, []), *value]
        else:
            found[name] = value
    return found


@pytest.fixture(scope="module")
def over_rabbitmq(compose: dict[str, Any]) -> dict[str, Any]:
    text = (FOLDER / "rabbitmq.yaml").read_text(encoding="utf-8")
    override = filled(yaml.load(text, _Override), variables("images.env"))
    return merged(compose, override)


@pytest.fixture(scope="module")
def with_archive(compose: dict[str, Any]) -> dict[str, Any]:
    text = (FOLDER / "row-archive.yaml").read_text(encoding="utf-8")
    return merged(compose, filled(yaml.safe_load(text), variables("example.env")))


def validate(file: Path) -> subprocess.CompletedProcess[str]:
    """Validates a file against the Compose specification's schema."""
    return run(
        Path(sys.executable).parent / "check-jsonschema",
        *("--builtin-schema", "vendor.compose-spec"),
        file,
    )


def test_file_follows_the_specification() -> None:
    checked = validate(FOLDER / "compose.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("files", ["over_rabbitmq", "with_archive"])
def test_files_together_follow_the_specification(
    files: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    together = tmp_path / "compose.yaml"
    together.write_text(yaml.safe_dump(request.getfixturevalue(files)))
    checked = validate(together)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_rabbitmq_takes_the_place_of_pubsub(over_rabbitmq: dict[str, Any]) -> None:
    services = over_rabbitmq["services"]
    assert "pubsub" not in services
    wanted = {need for service in services.values() for need in service.get("depends_on", {})}
    assert wanted <= services.keys()
    clients = {name for name, service in services.items() if name in KINDS}
    assert clients == KINDS.keys()
    for name in clients | {"rabbitmq"}:
        assert {"path": "broker.env", "required": True} in services[name]["env_file"]
    assert services["functions"]["entrypoint"] == ["python", "-m", "workers.functions"]
    assert "command" not in services["functions"]
    sources = [one["source"] for one in services["rabbitmq"]["volumes"] if "source" in one]
    assert sources
    assert [one for one in sources if not (FOLDER / one).is_file()] == []


def test_rows_go_to_the_place_that_the_archive_reads(
    with_archive: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = with_archive["services"]
    archive = services["row-archive"]
    assert (
        archive.items()
        >= {
            name: services["bigquery"][name]
            for name in ("image", "user", "read_only", "cap_drop", "security_opt", "restart")
        }.items()
    )
    given = archive["environment"]
    for name in KINDS.keys() - {"provision"}:
        assert services[name]["environment"]["PENSTOCK_ROWS_URL"] == given["PENSTOCK_ROWS_URL"]
        assert archive["volumes"][0] in services[name]["volumes"]
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = RowArchiveSettings()
    assert f":{settings.health_port}/" in archive["healthcheck"]["test"][-1]
    of_api = services["api"]["environment"]
    assert settings.bigquery_endpoint == of_api["PENSTOCK_BIGQUERY_ENDPOINT"]
    assert archive["entrypoint"] == ["python", "-m", "infra.row_archive"]


def test_all_that_is_named_is_there(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    mounted = set()
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= services.keys(), name
        assert set(service.get("networks", [])) <= compose["networks"].keys(), name
        for volume in service.get("volumes", []):
            if isinstance(volume, dict):
                assert (FOLDER / volume["source"]).is_file(), volume
                assert volume["read_only"] is True
            else:
                mounted.add(volume.split(":")[0])
    assert mounted == compose["volumes"].keys()


def test_variables_without_a_default_are_in_the_examples() -> None:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    assert needed <= variables("images.env", "example.env").keys()


def test_nothing_has_rights_that_it_does_not_need(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        if name != "proxy-volumes":
            assert not service["user"].startswith(("0", "root")), name
    assert {name for name, service in services.items() if "cap_add" in service} == {
        "proxy",
        "proxy-volumes",
    }
    for name in {*KINDS, "keys"}:
        assert services[name]["user"] == image("api").last("USER")


def test_only_the_proxy_is_reached_from_outside(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    assert {name for name, service in services.items() if "ports" in service} == {"proxy"}
    assert compose["networks"]["servers"] == {"internal": True}
    for name in SERVERS:
        assert services[name]["networks"] == ["servers"]
    assert "servers" not in services["proxy"]["networks"]
    # The API trusts the proxy's headers about the caller, so nothing else may be on that network.
    assert {name for name, one in services.items() if "front" in one.get("networks", [])} == {
        "proxy",
        "api",
    }
    (subnet,) = compose["networks"]["front"]["ipam"]["config"]
    trusted = services["api"]["environment"]["PENSTOCK_TRUSTED_PROXIES"]
    assert trusted == subnet["subnet"]


def test_what_serves_is_restarted_and_checked(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name
        if name not in ONCE:
            assert service["healthcheck"]["test"][0] == "CMD", name
    for name in ("api", "functions", "batches", "pubsub", "bigquery", "worker-gpu"):
        script = services[name]["healthcheck"]["test"][-1]
        compile(script, name, "exec")


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_settings_are_known_and_accepted(
    services: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[Settings],
) -> None:
    given = services[name]["environment"]
    known = {
        f"PENSTOCK_{field.upper()}" for field in (*ApiSettings.model_fields, *kind.model_fields)
    }
    assert given.keys() <= known
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = kind()
    for endpoint in (settings.pubsub_endpoint, settings.bigquery_endpoint, settings.redis_url):
        host, port = re.findall(r"(\w+):([0-9]+)", endpoint)[0]
        assert host in SERVERS
        probe = " ".join(services[host]["healthcheck"]["test"])
        assert port in probe or host == "redis"


def test_api_and_functions_have_the_same_invoice_terms() -> None:
    terms = {"SELLER": "Example Inc.\n1 Main Street", "TAX_NAME": "VAT", "TAX_PERCENT": "19"}
    given = variables("images.env", "example.env")
    given |= {f"INVOICE_{name}": value for name, value in terms.items()}
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    services = filled(yaml.safe_load(text), given)["services"]
    for name in ("api", "functions"):
        environment = services[name]["environment"]
        assert {field: environment[f"PENSTOCK_INVOICE_{field}"] for field in terms} == terms


def test_all_share_one_place(services: dict[str, dict[str, Any]]) -> None:
    same = ("PROJECT", "DATASET", "PUBSUB_ENDPOINT", "REDIS_URL", "OBJECTS_URL")
    for field in same:
        assert len({services[name]["environment"][f"PENSTOCK_{field}"] for name in KINDS}) == 1
    for name in set(KINDS) - {"provision"}:
        assert "objects:/var/lib/penstock/objects" in services[name]["volumes"]


def test_folders_of_volumes_belong_to_the_user_of_the_image(
    services: dict[str, dict[str, Any]],
) -> None:
    """An empty named volume gets its owner from the folder in the image."""
    images = {
        "API_IMAGE": "api",
        "FUNCTIONS_IMAGE": "functions",
        "SERVERS_IMAGE": "servers",
        "WORKER_IMAGE": "worker",
    }
    ours = {variables("example.env")[name]: dockerfile for name, dockerfile in images.items()}
    for name, service in services.items():
        if service["image"] not in ours:
            continue
        made = [
            word
            for line in image(ours[service["image"]]).all("RUN")
            for words in re.findall(r"install -d -o 10001 -g 10001 ([^&]+)", line)
            for word in words.split()
        ]
        targets = [one.split(":")[1] for one in service["volumes"] if isinstance(one, str)]
        assert set(targets) <= set(made), name


def test_worker_asks_for_its_gpu(services: dict[str, dict[str, Any]]) -> None:
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy" not in services["worker-cpu"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]


def test_nothing_starts_without_keys_to_sign_with(services: dict[str, dict[str, Any]]) -> None:
    for name in ("api", "batches", "functions"):
        assert services[name]["env_file"] == [{"path": "signing.env", "required": True}]
    assert services["api"]["environment"]["PENSTOCK_KEYS_URL"].startswith("file:///")
    assert "keys:/var/lib/penstock/keys:ro" in services["api"]["volumes"]


def test_images_of_others_are_pinned_by_the_same_script(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho sha256:{'d' * 64}\n")
    docker.chmod(0o755)
    out = tmp_path / "images.env"
    source = str((FOLDER / "images.env").resolve())
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("infra/docker/pin.sh", out, PATH=path, SOURCE=source)
    assert done.returncode == 0, done.stderr
    pinned = [line for line in out.read_text().splitlines() if not line.startswith("#")]
    assert len(pinned) == 3
    assert all(line.endswith(f"@sha256:{'d' * 64}") for line in pinned)
