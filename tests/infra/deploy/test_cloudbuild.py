"""The Cloud Build files: valid, with every name defined and explained and every script tested."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.deploy.dockerfiles import run
from tests.infra.deploy.test_images import tool
from tests.limits import WAIT_LIMIT_S

SCRIPTS = Path("infra/cloudbuild")
FILES = [Path("cloudbuild.yaml"), SCRIPTS / "deploy.yaml", SCRIPTS / "rollback.yaml"]
BUILT_IN = {"PROJECT_ID", "BUILD_ID", "COMMIT_SHA"}
DIGEST = f"sha256:{'d' * 64}"


def config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def steps(path: Path) -> dict[str, dict[str, Any]]:
    return {step["id"]: step for step in config(path)["steps"]}


def every_step() -> list[Any]:
    return [
        pytest.param(path, step, id=f"{path.stem}-{step['id']}")
        for path in FILES
        for step in config(path)["steps"]
    ]


def words_of(step: dict[str, Any]) -> list[str]:
    return [step["name"], step.get("entrypoint", ""), *step.get("args", []), *step.get("env", [])]


def test_schema() -> None:
    done = run(tool("check-jsonschema"), "--builtin-schema", "vendor.cloudbuild", *FILES)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=str)
def test_steps_wait_for_steps_before_them(path: Path) -> None:
    before: set[str] = set()
    for step in config(path)["steps"]:
        assert step["id"] not in before
        assert set(step.get("waitFor", [])) <= before | {"-"}, step["id"]
        before.add(step["id"])
    assert len(before) == len(config(path)["steps"])


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_substitution_is_used_and_said_what_for(path: Path) -> None:
    declared = config(path)["substitutions"]
    text = path.read_text(encoding="utf-8")
    used = set(re.findall(r"(?<!\$)\$\{?(_[A-Z_]+)\}?", re.sub(r"(?m)^\s*#.*$", "", text)))
    assert used == set(declared)
    others = set(re.findall(r"(?<!\$)\$\{?([A-Z][A-Z_]*)\}?", re.sub(r"(?m)^\s*#.*$", "", text)))
    assert others <= BUILT_IN
    lines = text.splitlines()
    for name in declared:
        place = next(number for number, line in enumerate(lines) if line.startswith(f"  {name}:"))
        # A comment is directly above the variable or directly above the variable's group.
        while lines[place].lstrip().startswith("_"):
            place -= 1
        assert lines[place].lstrip().startswith("#"), name


@pytest.mark.parametrize(("path", "step"), every_step())
def test_step_has_a_limit_and_an_image_that_is_given(path: Path, step: dict[str, Any]) -> None:
    assert re.fullmatch(r"[0-9]+s", step["timeout"])
    assert int(step["timeout"][:-1]) < int(config(path)["timeout"][:-1])
    assert step["name"][1:] in config(path)["substitutions"]


@pytest.mark.parametrize(("path", "step"), every_step())
def test_script_is_there_and_gets_what_it_reads(path: Path, step: dict[str, Any]) -> None:
    scripts = [word for word in step.get("args", []) if word.endswith(".sh")]
    for called in scripts:
        scripts += re.findall(r"infra/cloudbuild/\w+\.sh", Path(called).read_text(encoding="utf-8"))
    # A check of the release can't come from the release itself.
    if step["id"] != "fetch":
        assert all(len(word) < 120 for word in step.get("args", [])), "more belongs into a file"
    given = {pair.split("=")[0] for pair in step.get("env", [])}
    read: set[str] = set()
    for script in scripts:
        text = Path(script).read_text(encoding="utf-8")
        named = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", text)) - set(
            re.findall(r"\b([A-Z][A-Z_]+)=", text)
        )
        read |= named - {"PWD"}
    # image.sh calls build.sh, which takes the revision.
    assert not scripts or given == read | (
        {"REVISION"} if "infra/cloudbuild/image.sh" in scripts else set()
    )


@pytest.mark.parametrize("path", FILES, ids=str)
def test_build_has_an_account_of_its_own(path: Path) -> None:
    found = config(path)
    name = "penstock-build" if path.name == "cloudbuild.yaml" else "penstock-deploy"
    assert (
        found["serviceAccount"]
        == f"projects/$PROJECT_ID/serviceAccounts/{name}@$PROJECT_ID.iam.gserviceaccount.com"
    )
    # A custom account does not have a bucket for logs.
    assert found["options"]["logging"] == "CLOUD_LOGGING_ONLY"
    assert found["options"]["substitutionOption"] == "MUST_MATCH"
    assert found["options"]["dynamicSubstitutions"] is True


def waits_for(found: dict[str, dict[str, Any]], step: str) -> set[str]:
    """The steps that must have succeeded before a step starts."""
    own = set(found[step].get("waitFor", [])) - {"-"}
    return own.union(*(waits_for(found, one) for one in own))


def test_nothing_is_released_that_a_check_refused() -> None:
    found = steps(Path("cloudbuild.yaml"))
    checks = {
        "lint",
        "types",
        "tests",
        "terraform",
        "scan",
        "sbom-api",
        "sbom-functions",
        "sbom-worker",
    }
    assert checks <= waits_for(found, "push")
    assert {"push", "sbom", "held", "plan"} <= waits_for(found, "release")


def test_nothing_is_changed_before_the_approval() -> None:
    words = " ".join(
        word for step in config(Path("cloudbuild.yaml"))["steps"] for word in words_of(step)
    )
    assert not re.search(r"apply|\broll\b|\bback\b|workers\.sh", words)
    texts = [(SCRIPTS / f"{name}.sh").read_text() for name in ("plan", "release", "state", "push")]
    assert not any("terraform apply" in text or '" apply' in text for text in texts)


def test_deployment_is_in_order() -> None:
    found = steps(SCRIPTS / "deploy.yaml")
    assert list(found) == [
        "fetch",
        "setup",
        "apply",
        "attest",
        "overlays",
        "objects",
        "workers",
        "smoke",
        "rollout",
    ]
    assert set(found) - {"rollout"} == waits_for(found, "rollout")


def test_rollout_has_time_for_its_steps_in_two_regions() -> None:
    found = config(SCRIPTS / "deploy.yaml")["substitutions"]
    watched_s = 2 * len(found["_STEPS"].split(",")) * float(found["_WATCH_S"])
    assert watched_s < int(steps(SCRIPTS / "deploy.yaml")["rollout"]["timeout"][:-1])
    # Monitoring shows requests up to three minutes late.
    assert float(found["_WATCH_S"]) >= 240


def test_shell_is_sound() -> None:
    scripts = [
        *SCRIPTS.glob("*.sh"),
        *Path("infra/docker").glob("*.sh"),
        Path("infra/setup.sh"),
        Path("tests/image_trial/run.sh"),
        Path("infra/install_torch.sh"),
    ]
    done = run(tool("shellcheck"), "--external-sources", *scripts)
    assert done.returncode == 0, done.stdout


def test_trigger_is_the_file_with_an_approval_before_it(checkout: Path) -> None:
    # As in gcloud, which does not treat `-` as a file.
    put(checkout, "gcloud", 'case "$*" in *import*) cp -- "${@: -1}" trigger.yaml ;; esac')
    done = script(checkout, "bash", "setup.sh", "example-project", "europe-west4", "_STEPS=10,100")
    assert done.returncode == 0, done.stderr
    trigger = yaml.safe_load((checkout / "trigger.yaml").read_text())
    assert trigger["approvalConfig"] == {"approvalRequired": True}
    assert trigger["substitutions"] == {
        "_RELEASE": "$(body.message.data.release)",
        "_DIGEST": "$(body.message.data.digest)",
        "_IMAGES": "$(body.message.data.images)",
        "_STEPS": "10,100",
    }
    assert trigger["serviceAccount"].endswith(
        "penstock-deploy@example-project.iam.gserviceaccount.com"
    )
    assert trigger["build"]["steps"] == config(SCRIPTS / "deploy.yaml")["steps"]


def test_accounts_get_no_right_to_everything() -> None:
    text = (SCRIPTS / "setup.sh").read_text()
    granted = " ".join(re.findall(r'^grant "(?:[^\\\n]|\\\n)*', text, re.M)).split()
    assert "pubsub.admin" in granted
    assert not {"owner", "editor"} & set(granted)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the scripts touch, with a release in progress and an empty folder
    for stand-in programs.
    """
    shutil.copytree("infra/cloudbuild", tmp_path / "infra/cloudbuild")
    shutil.copytree("infra/docker", tmp_path / "infra/docker")
    shutil.copy("pyproject.toml", tmp_path)
    for folder in ("bin", "release", "root"):
        (tmp_path / folder).mkdir()
    for image in ("api", "functions", "worker"):
        (tmp_path / f"release/{image}.image").write_text(f"r/{image}@{DIGEST}\n")
    return tmp_path


def put(checkout: Path, program: str, does: str = "") -> None:
    """Writes a program that records its arguments and does little else."""
    path = checkout / "bin" / program
    path.write_text(f'#!/bin/bash\necho "$*" >> "{checkout}/{program}.calls"\n{does}\n')
    path.chmod(0o755)


def calls(checkout: Path, program: str) -> list[str]:
    path = checkout / f"{program}.calls"
    return path.read_text().splitlines() if path.exists() else []


def script(
    checkout: Path, shell: str, name: str, *words: str, **given: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{checkout}/bin:{os.environ['PATH']}"} | given
    command = [shell, f"infra/cloudbuild/{name}", *words]
    return subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )


BUILDX = f"""
while [ $# -gt 0 ]; do
  [ "$1" = --metadata-file ] && printf '{{\\n  "containerimage.digest": "{DIGEST}"\\n}}\\n' > "$2"
  shift
done
"""


def test_worker_is_built_on_the_base_of_this_build(checkout: Path) -> None:
    put(checkout, "docker", BUILDX)
    given = {"REGISTRY": "r", "BUILD_ID": "b1", "REVISION": "abc"}
    (checkout / "release/bases.env").write_text(f"PYTHON_BASE=p@{DIGEST}\n")
    assert script(checkout, "bash", "image.sh", "cuda", **given).returncode == 0
    (checkout / "release/model_packages").write_text("x==1 y==2\n")
    done = script(checkout, "bash", "image.sh", "worker", **given)
    assert done.returncode == 0, done.stderr
    cuda, worker = calls(checkout, "docker")
    assert f"PYTHON_BASE=p@{DIGEST}" in cuda
    assert f"CUDA_BASE=r/cuda@{DIGEST}" in worker
    assert "--cache-from type=registry,ref=r/worker:cache" in worker
    assert "--build-arg MODEL_PACKAGES=x==1 y==2 ." in worker
    assert "MODEL_PACKAGES" not in cuda
    assert "--build-context" not in worker


@pytest.mark.parametrize(("folder", "option"), [("", ""), ("own", " --build-context classes=own")])
def test_worker_gets_the_classes_that_bring_packages(
    checkout: Path, folder: str, option: str
) -> None:
    put(checkout, "docker", BUILDX)
    (checkout / "release/bases.env").write_text(f"PYTHON_BASE=p@{DIGEST}\n")
    given = {"REGISTRY": "r", "BUILD_ID": "b1", "REVISION": "abc", "CLASSES_DIR": folder}
    (checkout / "release/model_packages").write_text("\n")
    assert script(checkout, "bash", "image.sh", "cuda", **given).returncode == 0
    done = script(checkout, "bash", "worker_image.sh", "--build-arg", "A=b", **given)
    assert done.returncode == 0, done.stderr
    assert calls(checkout, "docker")[-1].endswith(f" --build-arg A=b{option} .")
    assert (checkout / "release/worker.image").read_text() == f"r/worker@{DIGEST}\n"


def test_build_without_digest_is_none(checkout: Path) -> None:
    put(checkout, "docker", 'while [ "$1" != --metadata-file ]; do shift; done; echo "{}" > "$2"')
    (checkout / "release/bases.env").write_text(f"PYTHON_BASE=p@{DIGEST}\n")
    assert script(checkout, "bash", "image.sh", "api", REGISTRY="r", BUILD_ID="b").returncode == 1


@pytest.mark.parametrize(
    ("fault", "severities", "status"),
    [
        ("True|CRITICAL|n/CVE-1", "CRITICAL", 1),
        ("False|CRITICAL|n/CVE-1", "CRITICAL", 0),
        ("True|HIGH|n/CVE-1", "CRITICAL", 0),
        ("True|HIGH|n/CVE-1", "CRITICAL|HIGH", 1),
    ],
)
def test_scan_stops_what_can_be_mended(
    checkout: Path, fault: str, severities: str, status: int
) -> None:
    put(
        checkout,
        "gcloud",
        f'case "$*" in *list-vulnerabilities*) echo "{fault}" ;; *) echo scans/1 ;; esac',
    )
    done = script(checkout, "bash", "scan.sh", LOCATION="europe", SEVERITIES=severities)
    assert done.returncode == status, done.stdout + done.stderr
    assert len(calls(checkout, "gcloud")) == 6


def test_lists_of_parts_go_where_the_account_may_add_them(checkout: Path) -> None:
    put(checkout, "gcloud")
    done = script(
        checkout, "bash", "sbom.sh", BUILD_ID="b1", SBOM_BUCKET="example-project-penstock-sboms"
    )
    assert done.returncode == 0, done.stderr
    loaded = calls(checkout, "gcloud")
    assert len(loaded) == 3
    # A separate folder, because an object with the same name could not be overwritten.
    assert all(
        call.endswith("--destination gs://example-project-penstock-sboms/b1") for call in loaded
    )
    granted = (SCRIPTS / "setup.sh").read_text()
    assert "sboms=$project-penstock-sboms" in granted
    assert 'grant_bucket "$sboms" "$build" storage.objectCreator\n' in granted


def test_release_is_fetched_into_an_empty_workspace(checkout: Path, tmp_path: Path) -> None:
    """A build started by a message has no source, so the workspace is empty."""
    empty = tmp_path / "workspace"
    empty.mkdir()
    put(checkout, "gcloud")
    given = {"BUILD_ID": "b1", "RELEASES_BUCKET": "releases", "TOPIC": "releases"}
    assert script(checkout, "bash", "release.sh", **given).returncode == 0
    (published,) = [call for call in calls(checkout, "gcloud") if "publish" in call]
    message = json.loads(published.partition("--message ")[2])
    # As with gcloud, the folder must exist.
    put(
        checkout,
        "gcloud",
        f'into="${{@: -1}}"; [ -d "$into" ] || exit 1\ncp -r "{checkout}/release/." "$into"',
    )
    words = steps(SCRIPTS / "deploy.yaml")["fetch"]["args"]
    for name in ("release", "digest", "images"):
        words = [word.replace(f"$_{name.upper()}", message[name]) for word in words]
    done = subprocess.run(
        ["bash", *words],
        cwd=empty,
        env={"PATH": f"{checkout}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (empty / "root").is_dir()


def test_scan_that_did_not_run_stops_too(checkout: Path) -> None:
    put(checkout, "gcloud")
    assert (
        script(checkout, "bash", "scan.sh", LOCATION="europe", SEVERITIES="CRITICAL").returncode
        == 1
    )


def test_release_names_its_images_by_digest_for_both_kinds_of_root(checkout: Path) -> None:
    put(checkout, "docker")
    (checkout / "release/bases.env").write_text(f"# A remark.\nPYTHON_BASE=p:3.11@{DIGEST}\n")
    asked = {"BUILD_ID": "11112222-3333", "REVISION": "abc", "PROJECT_ID": "example-project"}
    done = script(checkout, "bash", "push.sh", REGISTRY="r", **asked)
    assert done.returncode == 0, done.stderr
    provenance = json.loads((checkout / "release/provenance.json").read_text())
    assert [one["name"] for one in provenance["subject"]] == ["r/api", "r/functions", "r/worker"]
    definition = provenance["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"revision": "abc", "version": "0.1.0"}
    (base,) = definition["resolvedDependencies"]
    assert base == {"uri": "p:3.11", "digest": {"sha256": DIGEST.removeprefix("sha256:")}}
    given = json.loads((checkout / "release/images.auto.tfvars.json").read_text())
    api, functions = f"r/api@{DIGEST}", f"r/functions@{DIGEST}"
    assert given == {
        "api_image": api,
        "images": {
            "api": api,
            "dead_letters": functions,
            "reports": functions,
            "webhooks": functions,
        },
    }
    assert f"buildx imagetools create --tag r/api:0.1.0-11112222 --tag r/api:latest {api}" in calls(
        checkout, "docker"
    )
    minimal = Path("infra/terraform/examples/minimal/variables.tf").read_text()
    production = Path("infra/terraform/examples/production/variables.tf").read_text()
    assert 'variable "api_image"' in minimal
    assert all(f'"{name}"' in production for name in given["images"])


TERRAFORM = """
case "$*" in
  *" init"*) touch "${1#-chdir=}/.terraform.lock.hcl" ;;
  *" show "*) echo readable ;;
  *" output -json platform"*) echo '{"api_urls": {"r1": "https://a"}, "clusters": {"r1": "penstock-r1"}}' ;;
  *" output "*) echo '{}' ;;
esac
"""  # noqa: E501


def test_what_is_applied_is_what_was_planned(checkout: Path) -> None:
    put(checkout, "terraform", TERRAFORM)
    given = {"ROOT": "root", "STATE_BUCKET": "state"}
    (checkout / "release/images.auto.tfvars.json").write_text("{}")
    own = {"PROJECT_ID": "example-project", "LOCATION": "europe"}
    planned = script(checkout, "sh", "plan.sh", **own, **given)
    assert planned.returncode == 0, planned.stderr
    assert (checkout / "release/plan.txt").read_text() == "readable\n"
    assert (checkout / "root/state_override.tf").read_text().startswith("terraform {")
    (checkout / "root/.terraform.lock.hcl").unlink()
    applied = script(checkout, "sh", "apply.sh", **given)
    assert applied.returncode == 0, applied.stderr
    (plan,) = [call for call in calls(checkout, "terraform") if " plan " in call]
    (apply,) = [call for call in calls(checkout, "terraform") if " apply " in call]
    assert plan.endswith(f"-out {checkout}/release/saved.plan")
    assert apply.endswith(f" {checkout}/release/saved.plan")
    inits = {call for call in calls(checkout, "terraform") if " init" in call}
    assert len(inits) == 1
    assert "-backend-config bucket=state -backend-config prefix=platform" in inits.pop()


def test_root_with_a_backend_keeps_it(checkout: Path) -> None:
    put(checkout, "terraform")
    (checkout / "root/main.tf").write_text('terraform {\n  backend "gcs" { bucket = "own" }\n}\n')
    assert (
        script(checkout, "sh", "state.sh", "root", "platform", STATE_BUCKET="state").returncode == 0
    )
    assert calls(checkout, "terraform") == ["-chdir=root init -input=false -no-color"]
    assert not (checkout / "root/state_override.tf").exists()


def test_workers_of_every_region_are_applied(checkout: Path) -> None:
    # Reads its input, as any program may, but must not swallow the list of regions.
    put(checkout, "terraform", "cat > /dev/null")
    (checkout / "release/clusters").write_text("r1 penstock-r1\nr2 penstock-r2\n")
    (checkout / "infra/terraform/workloads").mkdir(parents=True)
    done = script(checkout, "sh", "workers.sh", PROJECT_ID="p", STATE_BUCKET="state")
    assert done.returncode == 0, done.stderr
    applied = [call for call in calls(checkout, "terraform") if " apply " in call]
    assert len(applied) == 2
    inits = [call for call in calls(checkout, "terraform") if " init " in call]
    assert [call.split("prefix=")[1] for call in inits] == ["workloads/r1", "workloads/r2"]
    for region, call in zip(("r1", "r2"), applied, strict=True):
        assert f"-var region={region} -var cluster=penstock-{region}" in call
        assert call.endswith(f"-var objects_file={checkout}/var/deploy/{region}.yaml")


@pytest.mark.parametrize("topic", ["releases", ""])
def test_release_is_kept_and_its_approval_asked_for(checkout: Path, topic: str) -> None:
    put(checkout, "gcloud")
    (checkout / ".venv").mkdir()
    (checkout / ".venv/secret").touch()
    done = script(
        checkout, "bash", "release.sh", BUILD_ID="b1", RELEASES_BUCKET="kept", TOPIC=topic
    )
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        ["tar", "tzf", checkout / "release/source.tgz"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "./infra/cloudbuild/apply.sh" in listed
    assert not [name for name in listed if ".venv" in name or name.startswith("./release")]
    published = [call for call in calls(checkout, "gcloud") if "publish" in call]
    manifest = checkout / "release/manifest"
    named = {line.split()[1] for line in manifest.read_text().splitlines()}
    assert named == {f"./{name}.image" for name in ("api", "functions", "worker")} | {
        "./source.tgz"
    }
    wanted = {
        "release": "gs://kept/releases/b1",
        "digest": hashlib.sha256(manifest.read_bytes()).hexdigest(),
        "images": " ".join(f"r/{name}@{DIGEST}" for name in ("api", "functions", "worker")),
    }
    assert len(published) == bool(topic)
    for call in published:
        command, _, message = call.partition(" --message ")
        assert command == "pubsub topics publish releases"
        assert json.loads(message) == wanted


PLATFORM = {"attestor": "projects/p/attestors/a", "attestor_key": "projects/p/keys/k/versions/1"}


@pytest.mark.parametrize("platform", [PLATFORM, {"attestor": None, "attestor_key": None}, {}])
def test_images_are_attested_where_nodes_ask_for_it(
    checkout: Path, platform: dict[str, str | None]
) -> None:
    """The worker's image has already been attested, as after a retried deployment."""
    put(checkout, "gcloud", 'case "$*" in *list*r/worker@*) echo there ;; esac')
    (checkout / "release/platform.json").write_text(json.dumps(platform))
    done = script(checkout, "bash", "attest.sh")
    assert done.returncode == 0, done.stderr
    signed = [call for call in calls(checkout, "gcloud") if "sign-and-create" in call]
    wanted = [
        f"beta container binauthz attestations sign-and-create --artifact-url r/{image}@{DIGEST}"
        f" --attestor {PLATFORM['attestor']} --keyversion {PLATFORM['attestor_key']}"
        for image in ("api", "functions")
    ]
    assert signed == (wanted if platform.get("attestor") else [])
