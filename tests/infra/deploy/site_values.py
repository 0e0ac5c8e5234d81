"""Valid and invalid sites, as changes to the example."""

from __future__ import annotations

from typing import Any

from tests.infra.deploy.sites import GIVEN, RABBITMQ, example

DIGEST = f"@sha256:{'0a' * 32}"
GOOGLE = {"project": "example-project", "credentials_secret": "penstock-google"}
INGRESS = example()["ingress"]
KEDA = {"prometheus": "http://prometheus.monitoring:9090/prefix"}
SITES: dict[str, dict[str, Any]] = {
    "the example": {},
    "all from elsewhere": GIVEN,
    "rabbitmq": {"broker": RABBITMQ},
    "rabbitmq on another port": {"broker": RABBITMQ | {"port": 5671}, "objects": GIVEN["objects"]},
    "rabbitmq, scaled": {"broker": RABBITMQ, "autoscaling": KEDA},
    "scaled": {"autoscaling": KEDA},
    "scaled, labels out of order": {
        "autoscaling": KEDA | {"labels": {"site": "a/b:c.1", "cluster": "berlin-1"}}
    },
    "scaled, no labels": {"autoscaling": KEDA | {"labels": {}}},
    "rows in the store first": {
        "rows": {"kind": "embedded", "archive": True},
        "objects": {"kind": "bucket", "url": "gs://penstock/objects"},
        "google": GOOGLE,
    },
    "rows in the volume first": {"rows": {"kind": "embedded", "archive": True}},
    "google's broker without a pool": {"broker": {"kind": "google"}, "google": GOOGLE},
    "google's rows": {"rows": {"kind": "google"}, "google": GOOGLE},
    "google's broker and rows, scaled, volume": GIVEN
    | {
        "autoscaling": KEDA,
        "objects": {"kind": "volume", "volume": {"size": "1Ti"}},
    },
    "storage classes and sizes": {
        "broker": {"kind": "embedded", "volume": {"size": "1Ti", "storage_class": "fast"}},
        "rows": {"kind": "embedded", "volume": {"size": "512Mi", "storage_class": "0123"}},
        "redis": {
            "kind": "embedded",
            "memory": "1537Mi",
            "volume": {"size": "9Gi", "storage_class": "true"},
        },
    },
    "no wait for the disk, no class": {
        "broker": {"kind": "embedded", "fsync": False},
        "objects": {"kind": "volume", "volume": {"size": "1Gi"}},
        "redis": {"kind": "embedded", "memory": "2Ti"},
    },
    "no ingress, no batches": {"ingress": None, "batches": False},
    "ingress without annotations": {
        "ingress": {key: value for key, value in INGRESS.items() if key != "annotations"}
    },
    "an IPv6 ingress": {"ingress": INGRESS | {"networks": ["fd00:10::/32", "10.1.2.3"]}},
    "names that look like numbers": {
        "namespace": "12e3",
        "keys_secret": "0777",
        "signing_secret": "1.5",
        "dataset": "123_456",
        "region": "no",
        "ingress": INGRESS | {"class_name": "on", "annotations": {"a": "1", "b": "yes: {{ no }}"}},
    },
    "images by digest, few resources": {
        "images": {name: f"r.example.com:5000/{name}{DIGEST}" for name in example()["images"]},
        "api": {"replicas": 100, "cpu": "0.25"},
        "billing_tz": "America/Argentina/Buenos_Aires",
    },
    "an invoice seller in lines": {
        "invoices": {"seller": 'Müller & "Co": 50% <a>\n1 Main St, $(HOME)', "tax_percent": 8.875}
    },
    "a whole tax percentage": {"invoices": {"tax_name": "yes", "tax_percent": 19}},
    "redis with a default port": {
        "redis": {"kind": "given", "url": "redis://r.corp/3", "networks": ["10.9.0.0/16"]},
    },
    "labels of NVIDIA's plugin": {"time_slicing": True},
    "redis by address": {
        "redis": {"kind": "given", "url": "redis://10.9.0.7:6390", "networks": ["10.9.0.7"]},
    },
    "redis by an IPv6 address": {
        "redis": {"kind": "given", "url": "rediss://[fd00::7]:65535/15", "networks": ["fd00::7"]},
    },
}
"""Valid changes to the example."""
WRONG: dict[str, dict[str, Any]] = {
    "color": {"color": "blue"},
    "images.api": {"images": example()["images"] | {"api": "without a tag"}},
    "images.redis": {
        "images": {name: one for name, one in example()["images"].items() if name != "redis"}
    },
    "broker": {"broker": "embedded"},
    "broker.kind": {"broker": {"kind": "kafka"}},
    "broker.volume.size": {"broker": {"kind": "embedded", "volume": {"size": "20"}}},
    "broker.fsync": {"broker": {"kind": "embedded", "fsync": "sometimes"}},
    "broker.secret": {"broker": {"kind": "rabbitmq", "networks": ["10.0.0.0/8"]}},
    "broker.networks": {"broker": RABBITMQ | {"networks": []}},
    "broker.networks.0": {"broker": RABBITMQ | {"networks": ["10.0.0.256/8"]}},
    "broker.port": {"broker": RABBITMQ | {"port": 0}},
    "inbox_pool": {"broker": {"kind": "google", "inbox_first": 3}, "google": GOOGLE},
    "rows.memory": {"rows": {"kind": "embedded", "memory": "1Gi"}},
    "redis.url": {
        "redis": {"kind": "given", "url": "redis://me:secret@r", "networks": ["10.0.0.0/8"]}
    },
    "redis.memory": {"redis": {"kind": "embedded", "memory": "1G"}},
    "objects.url": {"objects": {"kind": "bucket", "url": "http://store"}},
    "google": {"rows": {"kind": "google"}},
    "google.project": {"google": GOOGLE | {"project": "P"}},
    "api.replicas": {"api": {"replicas": 0}},
    "api.cpu": {"api": {"cpu": "much"}},
    "ingress.host": {"ingress": INGRESS | {"host": "localhost"}},
    "ingress.tls_secret": {"ingress": {k: v for k, v in INGRESS.items() if k != "tls_secret"}},
    "autoscaling.prometheus": {"autoscaling": {"prometheus": "prometheus:9090"}},
    "autoscaling.labels": {"autoscaling": KEDA | {"labels": {"no-label": "x"}}},
    "billing_tz": {"billing_tz": "Mars/Base"},
    "invoices.tax_percent": {"invoices": {"tax_percent": 101}},
    "namespace": {"namespace": "Penstock"},
}
"""Invalid changes to the example, keyed by the name of the invalid field."""
