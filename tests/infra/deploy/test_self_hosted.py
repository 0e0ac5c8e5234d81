"""A whole deployment off Google, as Kustomize renders it: references, allowed connections, and
invalid values that are rejected.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.kubernetes.self_hosted import main
from infra.kubernetes.site import SelfHostedSite, read_site
from infra.row_archive.archive import RowArchiveSettings
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug
from shared.settings import ApiSettings, Settings, WorkerSettings
from tests.infra.deploy.dockerfiles import image
from tests.infra.deploy.manifests import Objects, of_kind, pod, workers
from tests.infra.deploy.sites import (
    EXAMPLE,
    GIVEN,
    MODELS,
    RABBITMQ,
    allows,
    environment,
    example,
    fits,
    kustomized,
    pods_of,
    rendered,
)
from workers.functions.settings import FunctionSettings

pytestmark = pytest.mark.slow(about_s=7)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return rendered(tmp_path_factory.mktemp("inside") / "site")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return rendered(tmp_path_factory.mktemp("elsewhere") / "site", **GIVEN)


@pytest.fixture(scope="module")
def over_rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """An external RabbitMQ, with every other server from this deployment."""
    return rendered(tmp_path_factory.mktemp("rabbitmq") / "site", broker=RABBITMQ)


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Rows go to a bucket first, and every server comes from this deployment."""
    return rendered(
        tmp_path_factory.mktemp("archived") / "site",
        rows={"kind": "embedded", "archive": True},
        objects=GIVEN["objects"],
    )


def test_workers_go_to_nodes_whose_gpus_are_shared_so(tmp_path: Path) -> None:
    objects = rendered(tmp_path / "site", time_slicing=True)
    config = yaml.safe_load((tmp_path / "site/time-slicing.yaml").read_text(encoding="utf-8"))
    offered = {
        name: yaml.safe_load(text).get("sharing", {}).get("timeSlicing", {}).get("resources", [])
        for name, text in config["data"].items()
    }
    for model in read_catalog(MODELS).models:
        (label,) = pod(workers(objects)[f"worker-{slug(model.name)}"])["nodeSelector"].items()
        assert label[0] == "nvidia.com/device-plugin.config"
        wanted = [{"name": "nvidia.com/gpu", "replicas": model.gpu.share}]
        assert offered[label[1]] == (wanted if model.gpu.share > 1 else [])
    assert len(offered) == 2


def test_workers_that_share_by_mps_go_to_nodes_with_its_server(tmp_path: Path) -> None:
    models = [
        {"name": name, "task": "embedding", "source": "local:a", "dimensions": 4, "gpu": gpu}
        for name, gpu in (
            ("turns", {"type": "l4", "share": 2}),
            ("together", {"type": "l4", "share": 2, "sharing": "mps"}),
        )
    ]
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    objects = kustomized(tmp_path / "site", file, example(time_slicing=True))
    config = yaml.safe_load((tmp_path / "site/time-slicing.yaml").read_text(encoding="utf-8"))
    sharing = {name: yaml.safe_load(text)["sharing"] for name, text in config["data"].items()}
    assert {name: list(modes) for name, modes in sharing.items()} == {
        "shared-by-2": ["timeSlicing"],
        "shared-by-2-mps": ["mps"],
    }
    worker = pod(workers(objects)["worker-together"])
    assert worker["nodeSelector"] == {"nvidia.com/device-plugin.config": "shared-by-2-mps"}
    assert "hostIPC" not in worker  # the plugin mounts the server's memory


def test_without_labels_workers_go_to_any_node(inside: Objects) -> None:
    assert all("nodeSelector" not in pod(worker) for worker in workers(inside).values())


def test_names_that_go_reads_as_numbers_stay_names(tmp_path: Path) -> None:
    objects = rendered(tmp_path / "site", namespace="12e3", keys_secret="0o17")
    assert "12e3" in of_kind(objects, "Namespace")
    volumes = {one["name"]: one for one in pods_of(objects)["api"]["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "0o17"


def test_every_part_is_there(inside: Objects) -> None:
    assert set(pods_of(inside)) == {
        *("api", "batches", "functions", "pubsub", "bigquery", "redis"),
        *workers(inside),
    }
    assert len(workers(inside)) == len(read_catalog(MODELS).models)
    assert set(of_kind(inside, "Service")) == {"api", "functions", "pubsub", "bigquery", "redis"}


def test_rabbitmq_is_reached_by_all_and_asked_by_functions(over_rabbitmq: Objects) -> None:
    found = pods_of(over_rabbitmq)
    assert "pubsub" not in found
    clients = {"api", "batches", "functions", *workers(over_rabbitmq)}
    for name in clients:
        (container,) = found[name]["containers"]
        assert {"secretRef": {"name": "penstock-broker"}} in container["envFrom"], name
        assert "PENSTOCK_PUBSUB_ENDPOINT" not in environment(over_rabbitmq, name)
    (provision,) = found["api"]["initContainers"]
    assert provision["args"][0] == "provision"
    assert {"secretRef": {"name": "penstock-broker"}} in provision["envFrom"]
    (functions,) = found["functions"]["containers"]
    assert (functions["command"], functions["args"]) == (["python", "-m", "workers.functions"], [])
    assert functions["env"][-1] == {"name": "PENSTOCK_HEALTH_PORT", "value": "8080"}
    assert functions["readinessProbe"]["httpGet"]["path"] == "/readyz"
    egress = of_kind(over_rabbitmq, "NetworkPolicy")["clients"]["spec"]["egress"]
    assert {
        "to": [{"ipBlock": {"cidr": "10.3.0.0/16"}}],
        "ports": [{"port": 5672, "protocol": "TCP"}],
    } in egress


def test_prometheus_reads_every_process_that_has_metrics(
    over_rabbitmq: Objects, inside: Objects
) -> None:
    served = {"api": "metrics", "batches": "metrics"} | dict.fromkeys(workers(inside), "health")
    assert lets_prometheus_in(inside) == set(served.items())
    assert lets_prometheus_in(over_rabbitmq) == {*served.items(), ("functions", "http")}


def lets_prometheus_in(objects: Objects) -> set[tuple[str, str]]:
    """The Deployments and ports that pods in the `monitoring` namespace may reach."""
    source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    return {
        (name, port["port"])
        for policy in of_kind(objects, "NetworkPolicy").values()
        for rule in policy["spec"].get("ingress", [])
        if source in rule["from"]
        for port in rule["ports"]
        for name, made in of_kind(objects, "Deployment").items()
        if fits(policy["spec"]["podSelector"], made["spec"]["template"]["metadata"]["labels"])
    }


def test_rows_go_to_the_bucket_that_the_archive_reads(
    archived: Objects, inside: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api", "batches", "functions", "row-archive", *workers(archived)):
        assert environment(archived, name)["PENSTOCK_ROWS_URL"] == "s3://penstock/objects/usage"
    (container,) = pods_of(archived)["row-archive"]["containers"]
    assert container["command"] == ["python", "-m", "infra.row_archive"]
    assert {"secretRef": {"name": "penstock-s3"}} in container["envFrom"]
    for variable, value in environment(archived, "row-archive").items():
        monkeypatch.setenv(variable, value)
    settings = RowArchiveSettings()
    assert settings.health_port == container["ports"][0]["containerPort"]
    assert allows(archived, "row-archive", "bigquery", 9050)
    assert not allows(archived, "row-archive", "api", 8080)
    assert "row-archive" not in pods_of(inside)
    assert "PENSTOCK_ROWS_URL" not in environment(inside, "api")


def test_days_of_reports_begin_where_the_site_says(tmp_path: Path) -> None:
    objects = rendered(tmp_path / "site", billing_tz="Europe/Berlin")
    (functions,) = pods_of(objects)["functions"]["containers"]
    assert {"name": "PENSTOCK_BILLING_TZ", "value": "Europe/Berlin"} in functions["env"]
    with pytest.raises(ValueError, match="not a time zone"):
        SelfHostedSite.model_validate(example(billing_tz="Mars"))


def test_api_and_functions_have_the_invoice_terms_of_the_site(
    inside: Objects, tmp_path: Path
) -> None:
    terms = {"seller": "Example Inc.\n1 Main Street", "tax_name": "VAT", "tax_percent": 19}
    objects = rendered(tmp_path / "site", invoices=terms)
    for name in ("api", "functions"):
        given = environment(objects, name)
        assert {field: given[f"PENSTOCK_INVOICE_{field.upper()}"] for field in terms} == {
            **terms,
            "tax_percent": "19",
        }
        assert environment(inside, name)["PENSTOCK_INVOICE_TAX_PERCENT"] == "0"


def test_nothing_of_google_is_asked_for(inside: Objects) -> None:
    text = yaml.safe_dump_all(inside)
    for word in ("cloud.google.com", "googleapis.com", "PodMonitoring", "keda.sh", "gs://"):
        assert word not in text, word


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("api", ApiSettings),
        ("batches", ApiSettings),
        ("functions", FunctionSettings),
        ("worker-all-minilm-l6-v2", WorkerSettings),
    ],
)
def test_settings_are_known_and_accepted(
    inside: Objects,
    elsewhere: Objects,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: type[Settings],
) -> None:
    known = {
        f"PENSTOCK_{field.upper()}" for found in (ApiSettings, kind) for field in found.model_fields
    }
    for objects in (inside, elsewhere):
        if name not in pods_of(objects):
            continue
        given = environment(objects, name)
        assert {one for one in given if one.startswith("PENSTOCK_")} <= known
        with monkeypatch.context() as variables:
            for variable, value in given.items():
                variables.setenv(variable, value)
            settings = kind()
        assert settings.pubsub_endpoint == ("pubsub:8085" if objects is inside else "")


def test_endpoints_are_services(inside: Objects) -> None:
    wanted = {
        "PENSTOCK_PUBSUB_ENDPOINT": "pubsub:8085",
        "PENSTOCK_BIGQUERY_ENDPOINT": "http://bigquery:9050",
        "PENSTOCK_REDIS_URL": "redis://redis:6379/0",
    }
    for name in ("api", "batches", "functions", *workers(inside)):
        assert environment(inside, name).items() >= wanted.items()
    for url in wanted.values():
        found = re.search(r"(\w+):([0-9]+)", url)
        assert found is not None
        host, port = found[1], int(found[2])
        (served,) = of_kind(inside, "Service")[host]["spec"]["ports"]
        (container,) = pods_of(inside)[host]["containers"]
        assert served["port"] == port
        assert [one["containerPort"] for one in container["ports"]] == [port]


def test_same_place_for_records_rows_and_objects(inside: Objects, elsewhere: Objects) -> None:
    for objects in (inside, elsewhere):
        for variable in ("PROJECT", "REGION", "DATASET", "OBJECTS_URL", "RECORDS_URL", "REDIS_URL"):
            values = {
                environment(objects, name)[f"PENSTOCK_{variable}"]
                for name in of_kind(objects, "Deployment")
            }
            assert len(values) == 1, variable


def test_all_that_is_mounted_or_read_is_there(inside: Objects, elsewhere: Objects) -> None:
    named = {"penstock-keys", "penstock-signing", "penstock-s3", "penstock-google"}
    for objects in (inside, elsewhere):
        maps, claims = of_kind(objects, "ConfigMap"), of_kind(objects, "PersistentVolumeClaim")
        accounts = of_kind(objects, "ServiceAccount")
        for name, found in pods_of(objects).items():
            assert found["serviceAccountName"] in accounts, name
            volumes = {one["name"]: one for one in found["volumes"]}
            templates = of_kind(objects, "StatefulSet").get(name, {"spec": {}})["spec"]
            own = {one["metadata"]["name"] for one in templates.get("volumeClaimTemplates", [])}
            for one in volumes.values():
                assert one.get("configMap", {"name": next(iter(maps))})["name"] in maps
                assert one.get("secret", {"secretName": "penstock-keys"})["secretName"] in named
                claim = one.get("persistentVolumeClaim")
                assert claim is None or claim["claimName"] in claims
            for container in [*found["containers"], *found.get("initContainers", [])]:
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted <= volumes.keys() | own, name
                for source in container.get("envFrom", []):
                    if "secretRef" in source:
                        assert source["secretRef"]["name"] in named
                    else:
                        assert source["configMapRef"]["name"] in maps


def test_pods_have_no_rights_that_they_do_not_need(inside: Objects) -> None:
    (namespace,) = of_kind(inside, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, found in pods_of(inside).items():
        assert found["automountServiceAccountToken"] is False, name
        assert found["securityContext"]["runAsNonRoot"] is True
        assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*found["containers"], *found.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def test_pods_are_probed_and_replaced_gently(inside: Objects) -> None:
    for name, found in pods_of(inside).items():
        (container,) = found["containers"]
        assert "livenessProbe" in container, name
        assert "readinessProbe" in container or name == "batches"
    assert {"api", *workers(inside)} == set(of_kind(inside, "PodDisruptionBudget"))


def test_commands_are_those_of_the_images(inside: Objects) -> None:
    assert image("servers").entry_point == ["penstock"]
    for name, words in (("pubsub", ["pubsub"]), ("bigquery", ["bigquery"])):
        (container,) = pods_of(inside)[name]["containers"]
        assert container["args"][:1] == words
        assert "--data-dir" in container["args"]
    (first,) = pods_of(inside)["api"]["initContainers"]
    assert first["args"] == ["provision", "--functions-url", "http://functions"]
    assert "--fsync" in pods_of(inside)["pubsub"]["containers"][0]["args"]


def test_who_may_connect_to_whom(inside: Objects) -> None:
    servers = {"pubsub": 8085, "bigquery": 9050, "redis": 6379}
    clients = ("api", "batches", "functions", *workers(inside))
    for client in clients:
        for server, port in servers.items():
            assert allows(inside, client, server, port), f"{client} to {server}"
        assert not allows(inside, client, "api", 8080), f"{client} to api"
    assert allows(inside, "pubsub", "functions", 8080)
    for client in ("redis", "bigquery", "api"):
        assert not allows(inside, client, "functions", 8080), client
    for client in servers:
        for server, port in servers.items():
            assert not allows(inside, client, server, port), f"{client} to {server}"
    assert "nothing-by-default" in of_kind(inside, "NetworkPolicy")


def test_servers_from_elsewhere_are_not_made(elsewhere: Objects) -> None:
    assert of_kind(elsewhere, "StatefulSet") == {}
    assert set(pods_of(elsewhere)) == {"api", "batches", *workers(elsewhere)}
    assert of_kind(elsewhere, "Ingress") == of_kind(elsewhere, "PersistentVolumeClaim") == {}
    assert "initContainers" not in pods_of(elsewhere)["api"]
    for name, found in pods_of(elsewhere).items():
        given = environment(elsewhere, name)
        assert given["PENSTOCK_REDIS_URL"] == "rediss://redis.corp:6380/1"
        assert given["PENSTOCK_OBJECTS_URL"] == "s3://penstock/objects"
        (container,) = found["containers"]
        assert {"secretRef": {"name": "penstock-s3"}} in container["envFrom"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert given["GOOGLE_APPLICATION_CREDENTIALS"].startswith(mounts["google"])
    of_api = environment(elsewhere, "api")
    assert (of_api["PENSTOCK_INBOX_POOL"], of_api["PENSTOCK_INBOX_FIRST"]) == ("4", "2000")
    assert of_api["PENSTOCK_REPLY_SLOTS"] == "2"
    egress = of_kind(elsewhere, "NetworkPolicy")["clients"]["spec"]["egress"]
    opened = {
        (to["ipBlock"]["cidr"], one["port"])
        for rule in egress
        for to in rule["to"]
        for one in rule["ports"]
        if "ipBlock" in to
    }
    assert {("10.1.0.0/16", 6380), ("10.2.0.9/32", 9000)} <= opened


def test_way_in_is_named_everywhere(inside: Objects) -> None:
    given = environment(inside, "api")
    assert given["PENSTOCK_PUBLIC_URL"] == "https://ai.example.com"
    assert given["PENSTOCK_TRUSTED_PROXIES"] == "10.244.0.0/16"
    spec = of_kind(inside, "Ingress")["api"]["spec"]
    assert spec["tls"] == [{"hosts": ["ai.example.com"], "secretName": "penstock-tls"}]
    (rule,) = of_kind(inside, "NetworkPolicy")["ingress"]["spec"]["ingress"]
    labels = rule["from"][0]["namespaceSelector"]["matchLabels"]
    assert labels == {"kubernetes.io/metadata.name": "ingress-nginx"}
    assert given["PENSTOCK_KEYS_URL"].startswith("file:///etc/penstock-keys/")


def test_volumes_are_as_asked_for(tmp_path: Path) -> None:
    objects = rendered(
        tmp_path / "site",
        broker={
            "kind": "embedded",
            "fsync": False,
            "volume": {"size": "7Gi", "storage_class": "ssd"},
        },
        redis={"kind": "embedded", "memory": "2Gi"},
    )
    broker = of_kind(objects, "StatefulSet")["pubsub"]
    (claim,) = broker["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    assert claim["spec"]["storageClassName"] == "ssd"
    assert "--fsync" not in pod(broker)["containers"][0]["args"]
    (redis,) = pods_of(objects)["redis"]["containers"]
    assert redis["resources"]["limits"]["memory"] == "2Gi"
    assert redis["args"][-2:] == ["--maxmemory", "1228mb"]


WRONG: list[tuple[str, object, str]] = [
    ("namespace", "Penstock", "namespace: String should match"),
    ("images.api", "registry/api", "images.api: String should match"),
    ("images.extra", "a:1", "images.extra: Extra inputs are not permitted"),
    ("broker", {"kind": "kafka"}, "broker: Input tag 'kafka'"),
    (
        "broker",
        {"kind": "google", "inbox_first": 9},
        "broker.google: inbox_first: requires inbox_pool",
    ),
    ("broker.volume.size", "20GB", "broker.embedded.volume.size: String should match"),
    ("broker.fsync", "maybe", "broker.embedded.fsync: Input should be a valid boolean"),
    ("rows.kind", None, "rows: "),
    ("redis.memory", "1G", "redis.embedded.memory: String should match"),
    (
        "redis",
        {"kind": "given", "url": "redis://:secret@host/0", "networks": ["10.0.0.0/8"]},
        "redis.given.url: String should match",
    ),
    (
        "redis",
        {"kind": "given", "url": "redis://host:65536/0", "networks": ["10.0.0.0/8"]},
        "redis.given.url: String should match",
    ),
    (
        "redis",
        {"kind": "given", "url": "redis://host/0", "networks": []},
        "redis.given.networks: Tuple should have at least 1",
    ),
    (
        "redis",
        {"kind": "given", "url": "redis://host/0", "networks": ["10.0.0.1/8"]},
        r"redis.given.networks.0: 10.0.0.1/8 has host bits set",
    ),
    ("objects", {"kind": "bucket", "url": "http://b"}, "objects.bucket.url: String should match"),
    ("objects", {"kind": "bucket", "url": "gs://bucket"}, "google: is required"),
    ("api.replicas", 0, "api.replicas: Input should be greater than or equal to 1"),
    ("api.replicas", 1.5, "api.replicas: Input should be a valid integer"),
    ("api.cpu", "one", "api.cpu: String should match"),
    ("api.replica", 2, "api.replica: Extra inputs are not permitted"),
    ("ingress.host", "localhost", "ingress.host: String should match"),
    ("ingress.networks", ["everywhere"], "ingress.networks.0: 'everywhere' does not appear"),
    ("autoscaling", {}, "autoscaling.prometheus: Field required"),
    (
        "autoscaling",
        {"prometheus": "http://user:secret@prometheus:9090"},
        "autoscaling.prometheus: String should match",
    ),
    (
        "autoscaling",
        {"prometheus": "http://prometheus:9090/"},
        "autoscaling.prometheus: String should match",
    ),
    (
        "autoscaling",
        {"prometheus": "http://prometheus:9090", "labels": {"cluster": 'a",b="c'}},
        "autoscaling.labels.cluster: String should match",
    ),
    ("ingress.tls_secret", None, "ingress.tls_secret: Input should be a valid string"),
]


def changed(path: str, value: object) -> dict[str, Any]:
    site = copy.deepcopy(example())
    *parents, last = path.split(".")
    place = site
    for name in parents:
        place = place[name]
    place[last] = value
    return site


@pytest.mark.parametrize(("path", "value", "reason"), WRONG, ids=lambda one: str(one)[:40])
def test_wrong_value_is_refused_by_name(
    tmp_path: Path, path: str, value: object, reason: str
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(yaml.safe_dump(changed(path, value)))
    with pytest.raises(ConfigurationError) as refused:
        read_site(file)
    assert refused.value.message.startswith(f"{file}: {reason}")


def test_command_refuses_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "site.yaml"
    words = ["--site", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "No such file" in capsys.readouterr().err
    file.write_text("[]")
    assert main(words) == 2
    file.write_text(EXAMPLE.read_text())
    assert main(words) == 0
    assert "kubectl kustomize" in capsys.readouterr().out
    assert main(words) == 0, "an overlay is replaced"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    assert main([*words[:-1], str(tmp_path / "other")]) == 2


def test_every_field_of_the_example_is_documented() -> None:
    text = Path("infra/kubernetes/site.py").read_text(encoding="utf-8")
    for name in re.findall(r"(?m)^([a-z_]+):", EXAMPLE.read_text(encoding="utf-8")):
        assert f"    {name}: " in text
