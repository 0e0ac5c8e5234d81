"""The first release of a project, as the runbook has it: with gcloud, Terraform and kubectl, from a
clone to an API that answers, in a project in which each account may do what `setup.sh` gave it.

Terraform's providers are those that TFOFFLINE names. Docker, syft and the taking apart of an image
by the scanner are stand-ins (programs.py). Of the build's own checks it runs the linters, and the
tests that look at the tree.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.tenants.api_key import parse_key
from tests.infra.deploy.terraform import CHECKER
from tests.infra.release.cloud import Cloud
from tests.infra.release.programs import write_programs
from tests.infra.release.providers import providers, put_answers
from tests.infra.release.replay import (
    BUILD,
    DEPLOY,
    IN_A_BROWSER,
    KEYS,
    OWNER,
    PROJECT,
    REGION,
    RUNBOOK,
    CommandFailed,
    Replay,
    StepFailed,
    blocks,
    check_out,
    link_environment,
)
from tests.infra.release.roles import PERMISSIONS
from tests.infra.release.servers import proxy

pytestmark = pytest.mark.slow(about_s=240)
TOOLS = ("gcloud", "terraform", "kubectl", "jq", "curl", "git", "make")
QUICK = {"_WATCH_S": "0"}
"""How long a step of the rollout is looked at."""
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
"""Steps that only look at the source."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replay, bytes]]:
    """A project after the runbook's first two steps, and what it then is, to go back to."""
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
        variables, first, *_ = blocks(RUNBOOK, "First deploy")
        assert IN_A_BROWSER in first
        replay.run(variables)
        replay.run(first.replace(IN_A_BROWSER, ""))
        (keys,) = blocks(KEYS, "The first key")
        (key,) = [word for word in replay.run(keys).split() if parse_key(word)]
        replay.variables["KEY"] = key
        yield replay, cloud.saved()


@pytest.fixture
def replay(begun: tuple[Replay, bytes], tmp_path: Path) -> Replay:
    """The same project, with a checkout and folders of its own."""
    first, saved = begun
    first.cloud.restore(saved)
    checkout = tmp_path / "checkout"
    shutil.copytree(first.checkout, checkout, symlinks=True)
    shutil.copytree(first.folder / "homes", tmp_path / "homes")
    made = replace(first, folder=tmp_path, checkout=checkout, variables=dict(first.variables))
    made.run(blocks(RUNBOOK, "First deploy")[0])
    return made


def submit(replay: Replay) -> dict[str, Any]:
    """Runs the command of the runbook that submits a build. Returns the build."""
    replay.run(blocks(RUNBOOK, "First deploy")[2])
    return replay.cloud.builds[-1]


def built(replay: Replay, *, without: set[str]) -> Path:
    """Submits a build and runs it, but for some steps. Returns its workspace."""
    build = submit(replay)
    workspace = replay.workspace(build, "build")
    link_environment(workspace)
    ran = replay.build(build, workspace, only=lambda step: step not in without)
    assert {step["id"] for step in build["steps"]} - set(ran) == without
    return workspace


def deployed(replay: Replay, *, installs: bool) -> None:
    """Runs the build that the release's message started, as if it were approved."""
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

    # Whoever applies by hand finds what Cloud Build made.
    *_, by_hand, workers, works = blocks(RUNBOOK, "First deploy")
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
    """Puts a fault back."""
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
    """As gcloud leaves `.gitignore` out where nothing says otherwise."""
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
    with pytest.raises(StepFailed, match=r"storage\.buckets\.create") as failed:
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
    assert failed.value.step == "rollout"  # a first release has no candidate beside it


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
    *_, workers, _ = blocks(RUNBOOK, "First deploy")
    assert old in workers
    replay.variables["WORKER"] = (
        f"{REGION}-docker.pkg.dev/{PROJECT}/penstock/worker@sha256:{'0' * 64}"
    )
    with pytest.raises(CommandFailed, match=said):
        replay.run(workers.replace(old, new))


def test_state_by_hand_elsewhere_is_found(replay: Replay) -> None:
    """With a state of its own, what was applied by hand is not there for Cloud Build."""
    state = replay.cloud.buckets[f"{PROJECT}-penstock-state"]
    del state["platform/default.tfstate"]
    with pytest.raises(StepFailed, match="not found"):
        built(replay, without=CHECKS)


UNUSED = {
    BUILD: {
        "roles/logging.logWriter": "Cloud Logging has the build's output",
        "roles/iam.securityReviewer": "Terraform compares policies, by providers of its own",
        "roles/secretmanager.secretAccessor": "Terraform compares versions of secrets",
        "roles/serviceusage.serviceUsageConsumer": "Terraform names the project of a budget",
    },
}
"""Roles that no request of the replay needs, and what needs them."""


def test_build_account_uses_what_it_has(replay: Replay) -> None:
    built(replay, without=CHECKS)
    cloud = replay.cloud
    idle = {
        role
        for roles in cloud.roles_of(BUILD).values()
        for role in roles
        if not PERMISSIONS.get(role, set()) & cloud.used[BUILD]
    }
    assert idle == UNUSED[BUILD].keys()
    assert all(account in (BUILD, OWNER) for account in cloud.used)
    assert DEPLOY not in cloud.used
