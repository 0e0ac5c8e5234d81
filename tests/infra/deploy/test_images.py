"""The Dockerfiles: linted, and consistent with the manifests, Terraform and the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import venv
from pathlib import Path

import grimp
import pytest

from infra.lock import read_lock, requirements
from shared.settings import ApiSettings, Settings, WorkerSettings
from tests.infra.deploy.dockerfiles import (
    FOLDER,
    IMAGES,
    SOURCES,
    copied_files,
    file_of,
    image,
    is_sent,
    run,
    stages,
    upstream,
)
from tests.infra.deploy.manifests import Objects, pod, settings_of, workers
from tests.infra.deploy.terraform import Plan
from workers.functions.settings import FunctionSettings

OURS = ("api", "functions", "servers", "worker")
MODULES = {
    "api": {"infra.cli.main", "api.__main__", "infra.row_archive.__main__"},
    "functions": {"workers.functions.main"},
    "servers": {
        "infra.cli.main",
        "bigquery_emulator.__main__",
        "pubsub_emulator.__main__",
        "infra.local.provision_servers",
    },
    "worker": {"workers.__main__", "workers.runtime.server", "workers.models"},
}
"""Modules started by the entry points, including in other processes."""
MEMBERS = ". ./emulators/bigquery ./emulators/pubsub"


def tool(name: str) -> str:
    """A program installed next to this Python."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is missing: make setup"
    return found


def test_linter_finds_nothing() -> None:
    done = run(
        tool("hadolint"), "--failure-threshold", "style", *sorted(FOLDER.glob("*.Dockerfile"))
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", OURS)
def test_files_that_are_copied_are_there_and_sent(name: str) -> None:
    for stage in stages(name):
        for sources, _ in stage.copied:
            for source in sources:
                path = Path(source)
                assert path.exists(), source
                files = (
                    [path]
                    if path.is_file()
                    else [file for file in path.iterdir() if file.is_file()]
                )
                assert files
                assert all(is_sent(file) for file in files), source


@pytest.mark.parametrize("name", OURS)
def test_image_holds_every_module_that_its_entry_point_imports(name: str) -> None:
    graph = grimp.build_graph("api", "workers", "shared", "infra", *SOURCES)
    # `penstock` imports the modules it runs. MODULES lists them per image.
    for importer in graph.find_descendants("infra.cli"):
        for imported in graph.find_modules_directly_imported_by(importer):
            if imported.startswith(("api.", "workers.")):
                graph.remove_import(importer=importer, imported=imported)
    needed = {file_of(module) for module in upstream(MODULES[name], graph)}
    assert len(needed) > 10
    assert needed <= copied_files(name)


def test_what_is_not_for_images_is_not_sent() -> None:
    for path in (
        ".git/config",
        "models.yaml",
        "var/models/x",
        "emulators/pubsub/tests/conftest.py",
        "infra/terraform/check.sh",
        "tests/conftest.py",
    ):
        assert not is_sent(Path(path)), path


def test_only_the_worker_has_torch() -> None:
    heavy = ("torch", "transformers", "diffusers", "onnxruntime", "scipy")
    for name, extras in (
        ("api", "api"),
        ("functions", "functions"),
        ("servers", "servers"),
    ):
        assert f"lock.py requirements {extras} >" in (FOLDER / f"{name}.Dockerfile").read_text()
        assert not [one for one in requirements(extras.split()) if one.startswith(heavy)]
    worker = [one.partition("=")[0] for one in requirements(["worker", "gpu"])]
    assert {"torch", "torchao", "diffusers", "google-cloud-pubsub"} <= set(worker)


def test_base_has_the_torch_that_the_worker_asks_for() -> None:
    assert f"torch=={read_lock()['torch'].version}" in requirements(["worker"])


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_installed_has_its_hash_in_the_lock(name: str) -> None:
    """Everything installed from an index has a hash in the lock, except for torch's own
    dependencies.
    """
    text = (FOLDER / f"{name}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    installs = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) [^&;]*", text)
    assert len(installs) >= 2
    for install in installs:
        if "--no-index" in install:
            continue  # our own wheel, built from packages that are already installed
        checked = "--require-hashes" in install or "--verify-hashes" in install
        # The base chooses its options, because other torch builds aren't in any lock file.
        assert checked or (name == "cuda" and '"$@"' in install), install
    if any("--verify-hashes" in install for install in installs):
        # Hashes are verified only for packages that have them, so packages without any are detected
        # here.
        assert "lock.py covers /tmp/installed.txt 'nvidia-*' 'cuda-*' triton" in " ".join(
            text.split()
        )


@pytest.mark.parametrize("name", OURS)
def test_unknown_extra_is_refused(name: str) -> None:
    with pytest.raises(KeyError):
        requirements([f"no-{name}"])


def test_servers_are_in_the_image_with_what_they_require() -> None:
    asked = requirements(["servers"])
    names = {one.partition("==")[0] for one in asked}
    assert {"duckdb", "zetasql", "lark", "grpcio-tools"} <= names
    assert not [name for name in names if name.startswith("penstock")]
    installed = stages("servers")[0].all("RUN")
    assert any(f"--wheel-dir /wheels {MEMBERS} " in " ".join(line.split()) for line in installed)


@pytest.mark.slow(about_s=10)
@pytest.mark.parametrize("name", ["api", "functions", "servers"])
def test_programs_of_ours_run_in_the_python_that_has_the_packages(
    name: str, tmp_path: Path
) -> None:
    """The base's Python runs the installation. It is in the image too, without the packages."""
    venv.create(tmp_path / "venv", with_pip=False)
    tree = tmp_path / "tree"
    for file in map(Path, copied_files(name)):
        # Modules would merely be compiled.
        if file.suffix != ".py" or file.name == "__init__.py":
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tree / file)
    (line,) = [line for line in stages(name)[0].all("RUN") if "--target /app" in line]
    for command in line.split("&&"):
        if command.split()[:3] == ["python", "-m", "pip"]:
            for path in ("/app", "/opt/venv", "/wheels"):
                command = command.replace(f" {path}", f" {tmp_path / Path(path).name}")
            command = command.replace("python", shlex.quote(sys.executable), 1)
            done = run("sh", "-c", f"cd {tree} && {command}")
            assert done.returncode == 0, done.stderr
    programs = [file for file in (tmp_path / "app/bin").iterdir() if file.name != "__pycache__"]
    assert "penstock" in {program.name for program in programs}
    for program in programs:
        # On the same line after its name, or on the next line if it is long.
        named = "".join(program.read_text(encoding="utf-8").splitlines()[:2])
        assert str(tmp_path / "venv/bin/python") in named, program


def test_member_whose_folder_is_missing_is_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_bytes(Path("pyproject.toml").read_bytes())
    with pytest.raises(FileNotFoundError, match="penstock-pubsub-emulator"):
        requirements(["servers"], project)


def test_user_is_that_of_the_manifests(objects: Objects) -> None:
    contexts = [pod(worker)["securityContext"] for worker in workers(objects).values()]
    users = {f"{found['runAsUser']}:{found['runAsGroup']}" for found in contexts}
    for name in IMAGES:
        assert {image(name).last("USER")} == users


def test_worker_starts_as_in_the_manifests(objects: Objects) -> None:
    built = image("worker")
    for worker in workers(objects).values():
        (container,) = pod(worker)["containers"]
        assert container["command"] == built.entry_point
        assert [str(port["containerPort"]) for port in container["ports"]] == built.all("EXPOSE")


def test_worker_has_the_settings_of_the_manifests(objects: Objects) -> None:
    environment = image("worker").environment
    for worker in workers(objects).values():
        given = settings_of(objects, worker)
        for name in environment.keys() & given.keys():
            assert environment[name] == given[name], name
        assert {
            "HF_HOME",
            "HOME",
            "PENSTOCK_MODELS_FILE",
            "PENSTOCK_SPOOL_DIR",
        } <= environment.keys() & given.keys()


def test_worker_writes_only_where_the_manifests_mount(objects: Objects) -> None:
    environment = image("worker").environment
    # Class environments are created when the image is built.
    read_only = {"PENSTOCK_ENVIRONMENTS_DIR"}
    written = [
        value
        for name, value in environment.items()
        if re.search("_DIR$|HOME$", name) and name not in read_only
    ]
    for worker in workers(objects).values():
        (container,) = pod(worker)["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = [
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        ]
        for path in written:
            assert any(
                Path(mount) == Path(path) or Path(mount) in Path(path).parents for mount in mounts
            ), path


def test_api_has_the_settings_and_the_port_of_terraform(plan: Plan) -> None:
    built = image("api")
    containers = [
        container
        for service in plan.of("google_cloud_run_v2_service")
        for container in service["template"][0]["containers"]
        if container.get("name") == "api"
    ]
    assert containers
    for container in containers:
        given = {env["name"]: env.get("value") for env in container["env"]}
        shared = built.environment.keys() & given.keys()
        assert {
            "PENSTOCK_HOST",
            "PENSTOCK_PORT",
            "PENSTOCK_MODELS_FILE",
            "PENSTOCK_SPOOL_DIR",
        } == shared
        assert all(built.environment[name] == given[name] for name in shared)
        assert built.all("EXPOSE") == [str(container["ports"][0]["container_port"])]


def test_functions_start_what_terraform_names(plan: Plan) -> None:
    built = image("functions")
    sources = {
        env["value"]
        for service in plan.of("google_cloud_run_v2_service")
        for container in service["template"][0]["containers"]
        for env in container["env"] or []
        if env["name"] == "FUNCTION_SOURCE"
    }
    # Relative to the image's working directory, which contains the copied files.
    assert sources == {built.environment["FUNCTION_SOURCE"]}
    assert sources <= copied_files("functions")
    assert built.last("WORKDIR") == built.environment["PYTHONPATH"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("api", ApiSettings), ("functions", FunctionSettings), ("worker", WorkerSettings)],
)
def test_every_setting_is_one_of_the_code(name: str, kind: type[Settings]) -> None:
    given = {setting for setting in image(name).environment if setting.startswith("PENSTOCK_")}
    assert given <= {f"PENSTOCK_{field.upper()}" for field in kind.model_fields}


@pytest.mark.parametrize("name", OURS)
def test_image_is_looked_after(name: str) -> None:
    built = image(name)
    assert built.environment["PYTHONDONTWRITEBYTECODE"] == "1"
    kind, command = built.last("HEALTHCHECK").split(" CMD ")
    assert "--start-period" in kind
    script = json.loads(command)[-1]
    compile(script, "healthcheck", "exec")
    for port in built.last("EXPOSE").split():
        assert port in script
    labels = built.last("LABEL")
    for label in ("title", "licenses", "base.name", "revision", "version"):
        assert f"org.opencontainers.image.{label}=" in labels
