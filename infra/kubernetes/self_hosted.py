"""`python -m infra.kubernetes.self_hosted`: the overlay of a whole deployment off Google.

Workers are those of every other cluster (overlay.py). Around them come the API, the runner of
batches, the functions, and the servers that the site does not take from elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.kustomization import write_kustomization
from infra.kubernetes.overlay import clear_overlay, write_overlay
from infra.kubernetes.site import SelfHostedSite, VolumeObjects, read_site
from infra.kubernetes.site_clients import write_clients
from infra.kubernetes.site_parts import (
    CONTAINER,
    objects_claim,
    server_patches,
    write_ingress,
    write_network,
    write_server,
)
from infra.kubernetes.site_scraping import write_scraping
from infra.kubernetes.site_settings import (
    CREDENTIALS_DIR,
    OBJECTS_DIR,
    secret_of_broker,
    worker_deployment,
)
from shared.catalog import Catalog, read_catalog
from shared.errors import ConfigurationError


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the overlay. Returns 0, or 2 if an argument or the site file is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.kubernetes.self_hosted", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--site", type=Path, required=True, help="see site.example.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the overlay")
    parser.add_argument(
        "--models-file", type=Path, default=Path("models.yaml"), help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        site, catalog = read_site(options.site), read_catalog(options.models_file)
        write_self_hosted(options.out, site, catalog, options.models_file)
    except ConfigurationError as error:
        print(f"infra.kubernetes.self_hosted: {error.message}", file=sys.stderr)
        return 2
    print(f"{options.out}: render with: kubectl kustomize {options.out}")
    return 0


def write_self_hosted(out: Path, site: SelfHostedSite, catalog: Catalog, models_file: Path) -> None:
    """Writes the overlay, and replaces an existing one.

    Args:
        out: the folder. Files of an earlier run are deleted.
        site: what runs there, and with what.
        catalog: the models to serve.
        models_file: where it was read.

    Raises:
        ConfigurationError: as `write_overlay`.
    """
    clear_overlay(out)
    write_overlay(out / "workers", catalog, models_file, worker_deployment(site))
    write_clients(out / "clients", site, models_file)
    servers = server_patches(site)
    for name, patch in servers.items():
        write_server(out / name, name, site, patch)
    write_network(out / "network", site)
    folders = ["workers", "clients", *servers, "network"]
    if site.ingress is not None:
        write_ingress(out / "ingress", site.namespace, site.ingress)
        folders.append("ingress")
    if isinstance(site.objects, VolumeObjects):
        claim = objects_claim(site.namespace, site.objects)
        (out / "objects.yaml").write_text(yaml.safe_dump(claim), encoding="utf-8")
        folders.append("objects.yaml")
    if site.autoscaling is not None:
        write_scraping(out, site)
    write_kustomization(out, folders, patches=_patches_of_all(site))


def _patches_of_all(site: SelfHostedSite) -> list[dict[str, Any]]:
    """What every pod gets that computes or answers: the object store, and Google's credentials."""
    added: list[tuple[str, dict[str, Any]]] = []
    added += [("envFrom", one) for one in secret_of_broker(site)]
    if isinstance(site.objects, VolumeObjects):
        claim = {"name": "objects", "persistentVolumeClaim": {"claimName": "objects"}}
        added += [("volumes", claim), ("mount", {"name": "objects", "mountPath": OBJECTS_DIR})]
    elif site.objects.secret is not None:
        added.append(("envFrom", {"secretRef": {"name": site.objects.secret}}))
    if site.google is not None:
        secret = {"name": "google", "secret": {"secretName": site.google.credentials_secret}}
        mount = {"name": "google", "mountPath": CREDENTIALS_DIR, "readOnly": True}
        added += [("volumes", secret), ("mount", mount)]
    places = {
        "volumes": "/spec/template/spec/volumes/-",
        "mount": f"{CONTAINER}/volumeMounts/-",
        "envFrom": f"{CONTAINER}/envFrom/-",
    }
    patch = [{"op": "add", "path": places[place], "value": value} for place, value in added]
    # Every Deployment is one of these. The servers are StatefulSets.
    return [{"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(patch)}] if patch else []


if __name__ == "__main__":
    sys.exit(main())
