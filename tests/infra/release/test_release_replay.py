"""A project's first release, following the runbook: with gcloud, Terraform and kubectl, from a
clone to an API that responds, in a project in which each account has only the permissions that
`setup.sh` granted it.

Terraform's providers come from the stand-in named by TFOFFLINE. Docker, syft, and the scanner's
image unpacking are replaced by stand-ins (programs.py). Of the build's own checks, only the linters
and the tests that check the tree run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from shared.tenants.api_key import parse_key
from tests.infra.deploy.terraform import CHECKER
from tests.infra.deploy.test_first_apply import NEEDS
from tests.infra.release.api import Ask, Stored
from tests.infra.release.cloud import Cloud
from tests.infra.release.programs import write_programs
from tests.infra.release.providers import providers, put_answers
from tests.infra.release.replay import (
    BUILD,
    DEPLOY,
    DEPLOY_PAGE,
    IN_A_BROWSER,
    KEYS,
    OWNER,
    PROJECT,
    REGION,
    CommandFailed,
    Replay,
    StepFailed,
    blocks,
    check_out,
    link_environment,
)
from tests.infra.release.servers import proxy

pytestmark = pytest.mark.slow(about_s=240)
TOOLS = ("gcloud", "terraform", "kubectl", "jq", "curl", "git", "make")
QUICK = {"_WATCH_S": "0"}
"""How long a rollout step is observed."""
OF_IMAGES = {
    *("bases", "image-api", "image-functions", "image-cuda", "model-packages", "image-worker"),
    *(
        "scan",
        "sbom-api",
        "sbom-functions",
        "sbom-worker",
        "push",
        "sbom",
        "held",
        "plan",
        "release",
    ),
    *("types", "terraform"),
}
CHECKS = {"lint", "types", "tests", "terraform"}
"""Steps that only read the source."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replay, bytes]]:
    """A project after the runbook's first two steps, with its state saved so that it can be
    restored.
    """
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not CHECKER:
        pytest.skip("TFOFFLINE names no stand-in for Terraform's providers")
    folder = tmp_path_factory.mktemp("release")
    cloud = Cloud(PROJECT, OWNER, REGION)
    with proxy(cloud, folder) as (url, authority), providers(folder) as attach:
        programs = write_programs(folder / "programs", project=PROJECT, attach=attach)
        replay = Replay(cloud, url, authority, programs, folder, check_out(folder))
        put_answers(replay.checkout)
        variables, first, *_ = blocks(DEPLOY_PAGE, "First deploy")
        assert IN_A_BROWSER in first
        replay.run(variables)
        replay.run(first.replace(IN_A_BROWSER, ""))
        (keys,) = blocks(KEYS, "The first key")
        (key,) = [word for word in replay.run(keys).split() if parse_key(word)]
        replay.variables["KEY"] = key
        yield replay, cloud.saved()


@pytest.fixture
def replay(begun: tuple[Replay, bytes], tmp_path: Path) -> Replay:
    """The same project, with a separate checkout and separate folders."""
    first, saved = begun
    first.cloud.restore(saved)
    checkout = tmp_path / "checkout"
    shutil.copytree(first.checkout, checkout, symlinks=True)
    shutil.copytree(first.folder / "homes", tmp_path / "homes")
    made = replace(first, folder=tmp_path, checkout=checkout, variables=dict(first.variables))
    made.run(blocks(DEPLOY_PAGE, "First deploy")[0])
    return made


def submit(replay: Replay) -> dict[str, Any]:
    """Runs the runbook's command that submits a build. Returns the build."""
    replay.run(blocks(DEPLOY_PAGE, "First deploy")[2])
    return replay.cloud.builds[-1]


def built(replay: Replay, *, without: set[str]) -> Path:
    """Submits a build and runs it, skipping some steps. Returns its workspace."""
    build = submit(replay)
    workspace = replay.workspace(build, "build")
    link_environment(workspace)
    ran = replay.build(build, workspace, only=lambda step: step not in without)
    assert {step["id"] for step in build["steps"]} - set(ran) == without
    return workspace


def deployed(replay: Replay, *, installs: bool) -> None:
    """Runs the build started by the release's message, as if it had been approved."""
    build = replay.cloud.builds[-1]
    assert build["status"] == "PENDING", "nobody was asked"
    workspace = replay.workspace(build, "deploy")
    assert list(workspace.iterdir()) == []
    if installs:
        replay.build(build, workspace, given=QUICK)
        return
    replay.build(build, workspace, only=lambda step: step == "fetch")
    link_environment(workspace)
    replay.build(build, workspace, only=lambda step: step not in ("fetch", "setup"), given=QUICK)


def test_first_release(replay: Replay) -> None:
    cloud = replay.cloud
    workspace = built(replay, without={"types"})
    assert not (workspace / ".git").exists()
    deployed(replay, installs=True)
    assert [one["percent"] for one in cloud.traffic] == [100]
    assert "revision" in cloud.traffic[0]

    # A manual apply finds the resources that Cloud Build created.
    *_, by_hand, workers, works = blocks(DEPLOY_PAGE, "First deploy")
    images = {name.split("/")[-1].partition("@")[0]: name for name in cloud.images if "@" in name}
    replay.variables |= {"API": images["api"], "WORKER": images["worker"]}
    before = {name for name in cloud.buckets[f"{PROJECT}-penstock-state"] if "tfstate" in name}
    replay.run(by_hand)
    replay.run(workers)
    replay.run(works)
    states = {name for name in cloud.buckets[f"{PROJECT}-penstock-state"] if "tfstate" in name}
    assert states == before == {"platform/default.tfstate", f"workloads/{REGION}/default.tfstate"}

    assert cloud.unknown == []
    assert [one for one in cloud.refused if one[0] != OWNER] == []
    assert len(cloud.buckets[f"{PROJECT}-penstock-sboms"]) == 3


def changed(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / file
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{file} no longer has {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


ASKS_GIT = """    import subprocess

    asked = ["git", "ls-files", "-z"]
    found = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in found.split("\\0") if name]
"""


def test_list_of_files_from_git_stops_the_build(replay: Replay) -> None:
    paths = "(path.relative_to(root) for path in _below(root, ()))"
    body = f"    return sorted({paths}, key=os.fsencode)\n"
    changed(replay.checkout, "tests/source_files.py", body, ASKS_GIT)
    with pytest.raises(StepFailed, match="ls-files") as failed:
        built(replay, without=set(OF_IMAGES))
    assert failed.value.step == "tests"


def test_upload_without_the_rules_of_git_stops_the_build(replay: Replay) -> None:
    """Without that file, gcloud also uploads files that `.gitignore` excludes."""
    (replay.checkout / ".gcloudignore").unlink()
    with pytest.raises(StepFailed) as failed:
        built(replay, without=set(OF_IMAGES))
    assert failed.value.step == "tests"


def test_bucket_of_gclouds_own_stops_the_build(replay: Replay) -> None:
    changed(
        replay.checkout,
        "infra/cloudbuild/sbom.sh",
        ' \\\n    --destination "gs://$SBOM_BUCKET/$BUILD_ID"',
        "",
    )
    with pytest.raises(StepFailed, match=r"storage\.buckets\.") as failed:
        built(replay, without=CHECKS)
    assert failed.value.step == "sbom"
    assert (BUILD, "storage.buckets.create", f"projects/{PROJECT}") in replay.cloud.refused


def test_release_needs_its_folder(replay: Replay) -> None:
    built(replay, without=CHECKS)
    (fetch,) = [step for step in replay.cloud.builds[-1]["steps"] if step["id"] == "fetch"]
    fetch["args"][-1] = fetch["args"][-1].replace("mkdir -p release && ", "")
    with pytest.raises(
        StepFailed, match="Destination URL must name an existing directory"
    ) as failed:
        deployed(replay, installs=False)
    assert failed.value.step == "fetch"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("infra/rollout/rollout.py", "{url}/readyz", "{url}/healthz", "/healthz: 404"),
        (
            "infra/cloudbuild/image.sh",
            '  set -- --build-arg "MODEL_PACKAGES=$(cat release/model_packages)" "$@"\n',
            "",
            "no worker of all-MiniLM-L6-v2",
        ),
    ],
    ids=["healthz", "model-packages"],
)
def test_fault_that_callers_would_see_stops_the_deployment(
    replay: Replay, file: str, old: str, new: str, said: str
) -> None:
    changed(replay.checkout, file, old, new)
    built(replay, without=CHECKS)
    with pytest.raises(StepFailed, match=said) as failed:
        deployed(replay, installs=False)
    assert failed.value.step == "rollout"  # a first release has no other revision to compare with


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'sh infra/cloudbuild/state.sh infra/terraform/workloads "workloads/$R"\n',
            "",
            "run:\n *terraform init",
        ),
        ("> var/deploy/deployments.json", '> "$ROOT/deployments.json"', "deployments.json: "),
    ],
    ids=["no-init", "deployments-elsewhere"],
)
def test_faults_of_the_runbook_are_found(replay: Replay, old: str, new: str, said: str) -> None:
    *_, workers, _ = blocks(DEPLOY_PAGE, "First deploy")
    assert old in workers
    replay.variables["WORKER"] = (
        f"{REGION}-docker.pkg.dev/{PROJECT}/penstock/worker@sha256:{'0' * 64}"
    )
    with pytest.raises(CommandFailed, match=said):
        replay.run(workers.replace(old, new))


def test_state_by_hand_elsewhere_is_found(replay: Replay) -> None:
    """With separate states, Cloud Build does not see the resources that were applied by hand."""
    state = replay.cloud.buckets[f"{PROJECT}-penstock-state"]
    del state["platform/default.tfstate"]
    with pytest.raises(StepFailed, match="not found"):
        built(replay, without=CHECKS)


COMPARES = "Terraform's providers need it to plan"
UNUSED = {
    BUILD: {
        "roles/bigquery.metadataViewer": COMPARES,
        "roles/cloudscheduler.viewer": COMPARES,
        "roles/compute.viewer": COMPARES,
        "roles/container.clusterViewer": COMPARES,
        "roles/iam.roleViewer": COMPARES,
        "roles/iam.workloadIdentityPoolViewer": COMPARES,
        "roles/memorystore.viewer": COMPARES,
        "roles/monitoring.viewer": COMPARES,
        "roles/pubsub.viewer": COMPARES,
        "roles/secretmanager.viewer": f"{COMPARES}; can't read secret values",
        f"projects/{PROJECT}/roles/penstock_planner": (
            f"{COMPARES}: IAM policies, and resources without a viewer role"
        ),
        "roles/logging.logWriter": "writes the build's output to Cloud Logging",
        "roles/serviceusage.serviceUsageConsumer": "Terraform charges budget calls to the project",
    },
    DEPLOY: {
        "roles/binaryauthorization.attestorsAdmin": "nodes.binary_authorization",
        "roles/binaryauthorization.policyEditor": "nodes.binary_authorization",
        "roles/cloudscheduler.admin": "functions.reports, and the hourly export of API keys",
        "roles/cloudkms.admin": "nodes.binary_authorization: the release key",
        "roles/cloudkms.signerVerifier": "nodes.binary_authorization: signs with the release key",
        "roles/containeranalysis.notes.editor": "nodes.binary_authorization: the attestor's note",
        "roles/containeranalysis.occurrences.editor": "nodes.binary_authorization: attestations",
        "roles/iam.workloadIdentityPoolAdmin": "clusters outside Google",
        "roles/iam.serviceAccountUser": "creates services and nodes that run as our accounts",
        "roles/logging.logWriter": "writes the build's output to Cloud Logging",
    },
}
"""Roles that no request in the replay needs, and the reason for each."""
OF_DATA = {
    "bigquery.tables.getData",
    "pubsub.subscriptions.consume",
    "resourcemanager.projects.setIamPolicy",
    "secretmanager.versions.access",
    "storage.buckets.setIamPolicy",
    "storage.objects.update",
}
"""The account that runs every dependency's code must not be able to do these things anywhere."""


def idle_roles(cloud: Cloud, account: str) -> set[str]:
    """An account's roles that no request in the replay needed."""
    return {
        role
        for roles in cloud.roles_of(account).values()
        for role in roles
        if not cloud.permissions_of(role) & cloud.used[account]
    }


def of_resources(cloud: Cloud) -> set[str]:
    """The roles that may create the resources in the state."""
    stored = cloud.buckets[f"{PROJECT}-penstock-state"]["platform/default.tfstate"].data
    kinds = {one["type"] for one in json.loads(stored)["resources"] if one["mode"] == "managed"}
    made = (role for prefix, (_, role) in NEEDS.items() if any_begins(kinds, prefix))
    return {f"roles/{role}" for role in made if role}


def any_begins(kinds: set[str], prefix: str) -> bool:
    return any(kind.startswith(prefix) for kind in kinds)


ACCOUNTS = Path("infra/cloudbuild/accounts.md")
HEAD = "| account | on | role | used in the replay |\n|---|---|---|---|\n"


def table_of_accounts(cloud: Cloud) -> str:
    """Both accounts' roles in a release, each with the permissions used by the replay."""
    by_terraform = of_resources(cloud)
    lines = []
    for account in (BUILD, DEPLOY):
        for place, roles in sorted(cloud.roles_of(account).items()):
            for role in sorted(roles):
                used = sorted(cloud.permissions_of(role) & cloud.used[account])
                if role in UNUSED[account]:
                    said = f"not used: {UNUSED[account][role]}"
                elif not used and role in by_terraform:
                    said = "not used: Terraform needs it to create resources in the state"
                else:
                    said = ", ".join(used)
                name = role.removeprefix("roles/").rpartition("/")[2]
                cells = (account.partition("@")[0], _place(place), name, said)
                lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def _place(place: str) -> str:
    kind, name = place.split("/")[0], place.rpartition("/")[2].removeprefix(f"{PROJECT}-penstock-")
    return "project" if kind == "projects" else f"{kind.removesuffix('s')} {name}"


def test_accounts_may_what_they_use(replay: Replay) -> None:
    built(replay, without=CHECKS)
    cloud = replay.cloud
    assert idle_roles(cloud, BUILD) == UNUSED[BUILD].keys()
    assert DEPLOY not in cloud.used
    deployed(replay, installs=False)
    idle = idle_roles(cloud, DEPLOY)
    assert idle - of_resources(cloud) == UNUSED[DEPLOY].keys()
    assert cloud.used.keys() == {BUILD, DEPLOY, OWNER}
    table = table_of_accounts(cloud)
    assert table in ACCOUNTS.read_text(encoding="utf-8"), f"{ACCOUNTS} should have\n{table}"

    # Checks which buckets the account can access and that none of them holds data.
    buckets = {
        place.removeprefix(f"buckets/{PROJECT}-penstock-"): roles
        for place, roles in cloud.roles_of(BUILD).items()
        if place.startswith("buckets/")
    }
    assert buckets == {
        "releases": {"roles/storage.objectCreator", "roles/storage.objectViewer"},
        "sboms": {"roles/storage.objectCreator"},
        "source": {"roles/storage.objectViewer"},
        "state": {"roles/storage.objectViewer"},
    }
    of_project = cloud.roles_of(BUILD)[f"projects/{PROJECT}"]
    assert not of_project & {"roles/viewer", "roles/editor", "roles/owner"}
    allowed = {one for role in of_project for one in cloud.permissions_of(role)}
    assert not allowed & (OF_DATA | {"storage.objects.get", "storage.objects.list"})


@pytest.mark.parametrize("bucket", ["releases", "state"])
def test_build_cannot_change_the_past(replay: Replay, bucket: str) -> None:
    built(replay, without=CHECKS)
    cloud, place = replay.cloud, f"{PROJECT}-penstock-{bucket}"
    name = next(iter(cloud.buckets[place]))
    before = cloud.buckets[place][name].data
    upload = f"/upload/storage/v1/b/{place}/o"
    given = {"uploadType": "media", "name": name}
    for verb, path, query in (
        ("POST", upload, given),
        ("DELETE", f"/storage/v1/b/{place}/o/{quote(name, safe='')}", {}),
    ):
        asked = Ask(BUILD, verb, "storage.googleapis.com", path, query, b"other", {})
        assert cloud.answer(asked).status == 403
    assert cloud.buckets[place][name].data == before


def add_file(release: dict[str, Stored], folder: str) -> None:
    release[f"{folder}/later.auto.tfvars.json"] = Stored(b"{}", 1)


def change_source(release: dict[str, Stored], folder: str) -> None:
    release[f"{folder}/source.tgz"] = Stored(b"other", 1)


def change_manifest(release: dict[str, Stored], folder: str) -> None:
    """A different image, with a matching manifest."""
    api = release[f"{folder}/api.image"].data
    other = api.replace(api[-8:-1], b"0000000")
    release[f"{folder}/api.image"] = Stored(other, 1)
    manifest = release[f"{folder}/manifest"].data
    was, now = (hashlib.sha256(one).hexdigest().encode() for one in (api, other))
    release[f"{folder}/manifest"] = Stored(manifest.replace(was, now), 1)


@pytest.mark.parametrize("change", [add_file, change_source, change_manifest])
def test_release_that_changed_since_its_approval_is_refused(
    replay: Replay, change: Callable[[dict[str, Stored], str], None]
) -> None:
    built(replay, without=CHECKS)
    given = replay.cloud.builds[-1]["substitutions"]
    folder = given["_RELEASE"].partition(f"{PROJECT}-penstock-releases/")[2]
    change(replay.cloud.buckets[f"{PROJECT}-penstock-releases"], folder)
    with pytest.raises(StepFailed) as failed:
        deployed(replay, installs=False)
    assert failed.value.step == "fetch"


def test_images_of_the_message_are_those_of_the_release(replay: Replay) -> None:
    built(replay, without=CHECKS)
    given = replay.cloud.builds[-1]["substitutions"]
    assert given["_IMAGES"].count("@sha256:") == 3
    given["_IMAGES"] = given["_IMAGES"].replace("sha256:", "sha256:0", 1)
    with pytest.raises(StepFailed) as failed:
        deployed(replay, installs=False)
    assert failed.value.step == "fetch"
