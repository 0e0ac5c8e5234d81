"""`python -m infra.kubernetes.site_chart`: a Helm chart for a complete deployment outside Google.

Its values are the fields of a site file, and its schema comes from the site's models (site.py). As
a result, `helm install --values site.yaml` accepts the same file as self_hosted.py and creates the
same objects. The chart contains the models' objects, so, like the images, it is specific to one
catalog.

The templates are not handwritten. Kustomize renders the overlays of a site in which every value is
a placeholder mark. Each mark is replaced by its value's template expression, and objects that only
some sites have are wrapped in a condition. Any change to the tree therefore also carries over to
the chart.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from infra.kubernetes.kustomization import TREE, dump_yaml
from infra.kubernetes.overlay import replace_folder
from infra.kubernetes.self_hosted import REDIS_DATA_PERCENT, write_self_hosted, write_time_slicing
from infra.kubernetes.site import KINDS, SelfHostedSite, site_schema
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog

RENDER_LIMIT_S = 120.0
Objects = list[dict[str, Any]]

_OWN: dict[str, Any] = {
    "namespace": "zz-namespace",
    "region": "zz-region",
    "dataset": "zz_dataset",
    "keys_secret": "zz-keys",
    "signing_secret": "zz-signing",
    "billing_tz": "Antarctica/Troll",
    "images": {
        name: f"zz.example/{name}:1" for name in ("api", "functions", "worker", "servers", "redis")
    },
    "broker": {"kind": "embedded", "volume": {"size": "9991Gi", "storage_class": "zz-broker"}},
    "rows": {
        "kind": "embedded",
        "volume": {"size": "9992Gi", "storage_class": "zz-rows"},
        "archive": True,
    },
    "redis": {
        "kind": "embedded",
        "volume": {"size": "9993Gi", "storage_class": "zz-redis"},
        "memory": "9995Mi",
    },
    "objects": {"kind": "volume", "volume": {"size": "9994Gi", "storage_class": "zz-objects"}},
    "time_slicing": True,
    "api": {"replicas": 97, "cpu": "9997m", "memory": "9998Mi"},
    "ingress": {
        "host": "zz.example.com",
        "class_name": "zz-class",
        "tls_secret": "zz-tls",
        "namespace": "zz-ingress",
        "networks": ["203.0.113.0/24"],
        "annotations": {"zz": "zz"},
    },
}
"""A site that runs our own servers, with a mark in each field."""
_RABBITMQ = {"kind": "rabbitmq", "secret": "zz-broker", "networks": ["203.0.113.1/32"]}
_AUTOSCALING = {"prometheus": "http://zz-prometheus", "labels": {"zz": "zz"}}
_MARKS = {
    "zz-namespace": ".Values.namespace",
    "zz-keys": ".Values.keys_secret",
    "zz-signing": ".Values.signing_secret",
    "Antarctica/Troll": ".Values.billing_tz",
    **{f"zz.example/{name}:1": f".Values.images.{name}" for name in _OWN["images"]},
    "9991Gi": "$site.broker.volume.size",
    "9992Gi": "$site.rows.volume.size",
    "9993Gi": "$site.redis.volume.size",
    "9994Gi": "$site.objects.volume.size",
    "9995Mi": "$site.redis.memory",
    f"{9995 * REDIS_DATA_PERCENT // 100}mb": 'include "penstock.maxmemory" $site.redis.memory',
    "9997m": ".Values.api.cpu",
    "9998Mi": ".Values.api.memory",
    "zz.example.com": ".Values.ingress.host",
    "zz-class": ".Values.ingress.class_name",
    "zz-tls": ".Values.ingress.tls_secret",
    "zz-ingress": ".Values.ingress.namespace",
    "http://zz-prometheus": ".Values.autoscaling.prometheus",
}
"""The expression for a scalar that consists only of the mark."""
_OF_SITE = frozenset(
    {f"PENSTOCK_{name}" for name in ("DATASET", "OBJECTS_URL", "PROJECT", "REGION")}
    | {f"PENSTOCK_{name}_URL" for name in ("PUBLIC", "RECORDS", "REDIS", "ROWS")}
    | {f"PENSTOCK_{name}" for name in ("INVOICE_SELLER", "INVOICE_TAX_NAME", "INVOICE_TAX_PERCENT")}
    | {"PENSTOCK_BIGQUERY_ENDPOINT", "PENSTOCK_PUBSUB_ENDPOINT", "PENSTOCK_TRUSTED_PROXIES"}
)
"""Settings that _site.tpl derives from the values. All other settings are the same in every site.
"""
EMBEDDED, OF_GOOGLE, RABBITMQ = (
    f'eq .Values.broker.kind "{kind}"' for kind in ("embedded", "google", "rabbitmq")
)
_CONDITIONS = {
    "batches": ".Values.batches",
    "bigquery": 'eq .Values.rows.kind "embedded"',
    "functions": f"not ({OF_GOOGLE})",
    "ingress": ".Values.ingress",
    "objects": 'eq .Values.objects.kind "volume"',
    "pubsub": EMBEDDED,
    "redis": 'eq .Values.redis.kind "embedded"',
    "row-archive": "$site.rows.archive",
}
"""Conditions for the objects with these names, except policies. All other objects exist in every
site.
"""
_SERVERS = f'not (and ({OF_GOOGLE}) (eq .Values.rows.kind "google"))'
"""The condition in SelfHostedSite.has_servers."""

Block = Callable[[str], str]
"""Replaces a value, along with its key or the dash before it, with template lines.

`INDENT` in them becomes the number of spaces before that line.
"""

_BLOCK = re.compile(r"(?m)^( *)[^'\n]*'@@([0-9]+)@@'$")
_SETTINGS_NAME = re.compile(r"(?m)\bsettings(?:-([a-z0-9-]+))?-[a-z0-9]{10}$")
_OPTIONAL_LINES = {
    r"(?m)^( *)storageClassName: zz-(\w+)$": (
        "\\1{{- with $site.\\2.volume.storage_class }}\n"
        "\\1storageClassName: {{ . | quote }}\n"
        "\\1{{- end }}"
    ),
    r"(?m)^( *)- --fsync$": ("\\1{{- if $site.broker.fsync }}\n\\1- --fsync\n\\1{{- end }}"),
}


def write_site_chart(out: Path, catalog: Catalog, models_file: Path, *, version: str) -> None:
    """Writes the chart, replacing an existing one. Needs kubectl to render.

    Args:
        out: output folder. Files from an earlier run are deleted.
        version: version of both the chart and the deployed software, as in pyproject.toml.

    Raises:
        ConfigurationError: kubectl is missing or rejects the overlay, or `out` is a folder that
        does not contain a chart.
    """
    own = _render_objects(catalog, models_file, _OWN)
    scaled = _render_objects(
        catalog, models_file, _OWN | {"broker": _RABBITMQ, "autoscaling": _AUTOSCALING}
    )
    with replace_folder(out, "Chart.yaml", "a chart") as folder:
        (folder / "templates").mkdir()
        (folder / "files").mkdir()
        head = {
            "apiVersion": "v2",
            "name": "penstock",
            "description": "Text, embedding, image and custom models behind an API, outside Google",
            "type": "application",
            "version": version,
            "appVersion": version,
        }
        _write_yaml(folder / "Chart.yaml", head)
        _write_yaml(folder / "values.yaml", default_values())
        _write_json(folder / "values.schema.json", site_schema())
        _write_json(folder / "files/defaults.json", _defaults_of_kinds())
        write_time_slicing(folder / "files", catalog)
        helpers = (TREE / "site-chart/_site.tpl").read_text(encoding="utf-8")
        helpers = helpers.replace("@PERCENT@", str(REDIS_DATA_PERCENT))
        (folder / "templates/_site.tpl").write_text(helpers, encoding="utf-8")
        for name, condition, manifest in _parts(own, scaled):
            _write_template(folder, name, condition, manifest)


def _render_objects(catalog: Catalog, models_file: Path, fields: dict[str, Any]) -> Objects:
    with tempfile.TemporaryDirectory(prefix=".penstock-chart-") as folder:
        out = Path(folder) / "site"
        write_self_hosted(out, SelfHostedSite.model_validate(fields), catalog, models_file)
        try:
            command = ["kubectl", "kustomize", str(out)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=RENDER_LIMIT_S
            )
        except FileNotFoundError as error:
            raise ConfigurationError(
                "kubectl is not installed; it is required to render the overlay"
            ) from error
        except subprocess.SubprocessError as error:
            reason = getattr(error, "stderr", None) or error
            raise ConfigurationError(f"kubectl kustomize: {reason}") from error
    return list(yaml.safe_load_all(done.stdout))


def default_values() -> dict[str, Any]:
    """Returns the site fields that have a default, except for parts with a `kind`."""
    site = SelfHostedSite.model_fields
    values = {
        name: field.get_default(call_default_factory=True)
        for name, field in site.items()
        if not field.is_required()
    }
    return {
        name: value.model_dump() if isinstance(value, BaseModel) else value
        for name, value in values.items()
        if value is not None
    }


def _defaults_of_kinds() -> dict[str, dict[str, dict[str, Any]]]:
    def of(kind: type[BaseModel]) -> dict[str, Any]:
        fields = {
            name: field.default
            for name, field in kind.model_fields.items()
            if not field.is_required() and field.default is not None
        }
        return {
            name: value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
            for name, value in fields.items()
        }

    return {part: {name: of(kind) for name, kind in kinds.items()} for part, kinds in KINDS.items()}


def _parts(own: Objects, scaled: Objects) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields each template's file name, condition ("" for none), and object."""
    over_rabbitmq = {_key(manifest): manifest for manifest in scaled}
    for manifest in own:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        file, condition = f"{_slug(kind)}-{name}", _CONDITIONS.get(name, "")
        if kind == "Namespace":
            file = "namespace"
        if kind == "Ingress":
            condition = _CONDITIONS["ingress"]
        elif kind == "NetworkPolicy" and name != "ingress":
            condition = ""
        if (kind, name) in {("Deployment", "functions"), ("NetworkPolicy", "functions")}:
            # Nothing is pushed to functions that pull jobs from RabbitMQ.
            yield f"{file}-rabbitmq", RABBITMQ, over_rabbitmq[_key(manifest)]
            condition = EMBEDDED if kind == "Deployment" else f"not ({RABBITMQ})"
        yield file, condition, manifest
    for manifest in scaled:
        if manifest["kind"] == "ScaledObject":
            name = f"{_slug(manifest['kind'])}-{manifest['metadata']['name']}"
            yield name, ".Values.autoscaling", manifest


def _key(manifest: dict[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _slug(kind: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind).lower()


def _write_template(out: Path, name: str, condition: str, manifest: dict[str, Any]) -> None:
    blocks: list[str] = []

    def block(text: str) -> str:
        blocks.append(text)
        return f"@@{len(blocks) - 1}@@"

    if manifest["kind"] == "ConfigMap":
        name = _config(out, manifest, block)
    elif edit := _EDITS.get(manifest["kind"]):
        edit(manifest, block)
    lines = ['{{- $site := include "penstock.site" . | fromJson }}']
    lines += [f"{{{{- if {condition} }}}}"] if condition else []
    lines += [_with_expressions(_dump(manifest), blocks).rstrip("\n")]
    lines += ["{{- end }}"] if condition else []
    (out / "templates" / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _dump(content: object) -> str:
    return dump_yaml(content, width=10**9)


def _with_expressions(text: str, blocks: Sequence[str]) -> str:
    """Replaces marks with expressions: blocks, whole scalars, names with a hash, labels."""
    while (expanded := _BLOCK.sub(lambda line: _indent(line, blocks), text)) != text:
        text = expanded
    for mark, expression in _MARKS.items():
        scalar = rf"(?m)(: |- )'?{re.escape(mark)}'?$"
        text = re.sub(scalar, rf"\1{{{{ {expression} | quote }}}}", text)
    for pattern, lines in _OPTIONAL_LINES.items():
        text = re.sub(pattern, lines, text)
    text = text.replace(',zz="zz"', '{{ include "penstock.matchers" . }}')
    return _SETTINGS_NAME.sub(_name_of_settings, text)


def _indent(line: re.Match[str], blocks: Sequence[str]) -> str:
    text = blocks[int(line[2])].replace("INDENT", str(len(line[1])))
    return "\n".join(f"{line[1]}{block_line}" for block_line in text.splitlines())


def _name_of_settings(line: re.Match[str]) -> str:
    slug: str | None = line[1]
    name = f"settings-{slug}" if slug else "settings"
    return f'{{{{ include "penstock.hashed" (list "{name}" ({_settings_of(slug)})) }}}}'


def _settings_of(slug: str | None) -> str:
    if slug:
        return f'include "penstock.worker" (list . "{slug}")'
    return 'include "penstock.clients" .'


def _config(out: Path, manifest: dict[str, Any], block: Block) -> str:
    """Writes the parts that are the same in every site to a file alongside the templates.

    Returns the template's name.
    """
    name = re.sub(r"-[a-z0-9]{10}$", "", manifest["metadata"]["name"])
    slug = manifest["metadata"].get("labels", {}).get("penstock.dev/model")
    folder = f"files/{slug}" if slug else "files"
    (out / folder).mkdir(exist_ok=True)
    if name.startswith("models"):
        path = f"{folder}/models.yaml"
        (out / path).write_text(manifest["data"]["models.yaml"], encoding="utf-8")
        manifest["data"]["models.yaml"] = block(
            f'models.yaml: {{{{ .Files.Get "{path}" | toJson }}}}'
        )
    else:
        same = {key: value for key, value in manifest["data"].items() if key not in _OF_SITE}
        _write_json(out / folder / ("settings.json" if slug else "clients.json"), same)
        lines = f"data:\n  {{{{- {_settings_of(slug)} | fromJson | toYaml | nindent 2 }}}}"
        manifest["data"] = block(lines)
    return f"config-map-{name}"


def _deployment(manifest: dict[str, Any], block: Block) -> None:
    name, pod = manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _add_to(container["envFrom"], "penstock.envFrom", block)
    _add_to(container["volumeMounts"], "penstock.volumeMounts", block)
    _add_to(pod["volumes"], "penstock.volumes", block)
    if name == "api":
        manifest["spec"]["replicas"] = block("replicas: {{ .Values.api.replicas | int64 }}")
        _provisioning(pod, block)
    elif name.startswith("worker-"):
        line = f"replicas: {manifest['spec']['replicas']}"
        manifest["spec"]["replicas"] = block(_if("not .Values.autoscaling", line))
        if selector := pod.get("nodeSelector"):
            lines = _dump({"nodeSelector": selector})
            pod["nodeSelector"] = block(_if(".Values.time_slicing", lines))


def _if(condition: str, lines: str) -> str:
    return f"{{{{- if {condition} }}}}\n{lines.rstrip()}\n{{{{- end }}}}"


def _add_to(items: list[Any], definition: str, block: Block) -> None:
    """Replaces the list items that this site adds in all Deployments with a template block."""
    added = ({"name": "objects"}, {"secretRef": {"name": "zz-broker"}})
    items[:] = [item for item in items if not any(mark.items() <= item.items() for mark in added)]
    items.append(block(f'{{{{- include "{definition}" . | trim | nindent INDENT }}}}'))


def _provisioning(pod: dict[str, Any], block: Block) -> None:
    (container,) = pod["initContainers"]
    secret = "- secretRef:\n    name: {{ .Values.broker.secret | quote }}"
    container["envFrom"].append(block(_if(RABBITMQ, secret)))
    pod["initContainers"] = block(_if(_SERVERS, _dump({"initContainers": [container]})))


def _ingress(manifest: dict[str, Any], block: Block) -> None:
    lines = (
        "{{- with .Values.ingress.annotations }}",
        "annotations:",
        "  {{- toYaml . | nindent 4 }}",
        "{{- end }}",
    )
    manifest["metadata"]["annotations"] = block("\n".join(lines))


def _network_policy(manifest: dict[str, Any], block: Block) -> None:
    if manifest["metadata"]["name"] == "clients":
        rules = '{{- include "penstock.egress" . | trim | nindent INDENT }}'
        manifest["spec"]["egress"].append(block(rules))


def _scaled_object(manifest: dict[str, Any], block: Block) -> None:
    """Only RabbitMQ's queues have metrics there."""
    triggers = manifest["spec"]["triggers"]
    triggers[-1] = block(_if(RABBITMQ, _dump([triggers[-1]])))


_EDITS: dict[str, Callable[[dict[str, Any], Block], None]] = {
    "Deployment": _deployment,
    "Ingress": _ingress,
    "NetworkPolicy": _network_policy,
    "ScaledObject": _scaled_object,
}


def _write_yaml(file: Path, content: object) -> None:
    file.write_text(_dump(content), encoding="utf-8")


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the chart. Returns 0, or 2 if an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.kubernetes.site_chart", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the chart to")
    parser.add_argument(
        "--models-file", type=Path, default=Path("models.yaml"), help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        catalog = read_catalog(options.models_file)
        version = importlib.metadata.version("penstock")
        write_site_chart(options.out, catalog, options.models_file, version=version)
    except ConfigurationError as error:
        print(f"infra.kubernetes.site_chart: {error.message}", file=sys.stderr)
        return 2
    print(f"{options.out}: {len(catalog.models)} models; its values are the fields of a site file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
