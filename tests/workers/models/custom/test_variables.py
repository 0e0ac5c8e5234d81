"""Variables in a catalog entry reach the class, and secrets reach nothing else."""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.auth.credentials import AnonymousCredentials

from shared.errors import ConfigurationError, ModelFailed
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.class_variables import SecretReference
from shared.settings import ClassSettings, read_settings
from tests.workers.models.custom.classes import (
    HEAD,
    compute,
    entry_of,
    output_of,
    prepared,
    write_class,
)
from tests.workers.models.custom.started import OperatorsLog, StartClass, StartedClass
from workers.models.custom.aside import AsideClass
from workers.models.custom.checking import inspect_folder
from workers.models.custom.measuring import Conditions, measure, read_inputs
from workers.models.custom.trial import predict
from workers.models.custom.variables import (
    EntryVariables,
    entry_variables,
    read_google_secret,
    variables_of,
)

HIDDEN = "[secret]"
TOKEN = "told-secret-0123456789"
READS = """
class Predictor(BasePredictor):
    def predict(self, names: List[str] = []) -> dict:
        return {name: os.environ.get(name) for name in names}
"""
LEAKS = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        print("set up with", os.environ["TOKEN"])

    def predict(self, fails: bool = False) -> str:
        print("computing with", os.environ["TOKEN"])
        if fails:
            raise RuntimeError("401 for " + os.environ["TOKEN"])
        return "done"
"""


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return f"local:{path}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "class").mkdir()
    return tmp_path / "class"


def run_once(entry: Model, folder: Path, **given: Any) -> Any:
    with StartedClass(entry, folder) as model:
        return output_of(compute(model, given))


def test_values_and_secrets_of_the_entry_reach_the_class(folder: Path, secret: str) -> None:
    cog_yaml = "environment: [ONE=cog, TWO=cog]\n"
    write_class(folder, READS, cog_yaml)
    entry = entry_of(folder, environment={"TWO": "entry", "EMPTY": ""}, secrets={"TOKEN": secret})
    names = ["ONE", "TWO", "EMPTY", "TOKEN"]
    expected = {"ONE": "cog", "TWO": "entry", "EMPTY": "", "TOKEN": TOKEN}
    assert run_once(entry, folder, names=names) == expected
    assert "TOKEN" not in os.environ


def test_secrets_are_in_nothing_that_is_shown(
    folder: Path, secret: str, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_class(write_class(folder, LEAKS), secrets={"TOKEN": secret})
    end = compute(model, {"fails": True})
    error = end.results[0]
    assert isinstance(error, ModelFailed)
    assert error.message == f"RuntimeError: 401 for {HIDDEN}"
    assert f"computing with {HIDDEN}" in end.logs[0].text
    operators_log.wait_for(f"set up with {HIDDEN}")
    model.close()
    entry = entry_of(folder, secrets={"TOKEN": secret})
    for text in (operators_log.look(), end.logs[0].text, entry.model_dump_json()):
        assert TOKEN not in text
    assert inspect_folder(folder).interface.as_json.count(TOKEN) == 0


def test_a_secret_in_two_pieces_is_found(
    folder: Path, secret: str, start_class: StartClass
) -> None:
    body = f"""
    class Predictor(BasePredictor):
        def predict(self, go: str) -> str:
            os.write(1, b"a {TOKEN[:12]}")
            while not os.path.exists(go):
                time.sleep(0.01)
            os.write(1, b"{TOKEN[12:]} b told-x {TOKEN[:9]}")
            return ""
    """
    model = start_class(write_class(folder, body), secrets={"TOKEN": secret})
    model.admit(0, prepared({"go": str(folder / "go")}))
    assert model.wait_for_logs(0).text == "a "
    (folder / "go").touch()
    logs = model.steps_until(0).logs[0]
    assert logs.text == f"a {HIDDEN} b told-x {TOKEN[:9]}", "all that there is"


def test_a_class_that_weighs_has_them_too(folder: Path, secret: str) -> None:
    body = (
        READS
        + """
    def work(self, input) -> int:
        return len(os.environ["TOKEN"])
"""
    )
    write_class(folder, body)
    entry = entry_of(folder, secrets={"TOKEN": secret}, work={"max": 100})
    aside = AsideClass(entry, folder)
    try:
        assert aside.weigh(prepared({})) == len(TOKEN)
    finally:
        aside.close()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"secrets": {"TOKEN": TOKEN}}, "secrets.TOKEN"),
        ({"secrets": {"TOKEN": "local:relative"}}, "secrets.TOKEN"),
        ({"secrets": {"TOKEN": "kubernetes:only-a-name"}}, "secrets.TOKEN"),
        ({"secrets": {"TOKEN": "google:projects/p/secrets/s"}}, "secrets.TOKEN"),
        ({"environment": {"1A": "x"}}, "environment"),
        ({"environment": {"PENSTOCK_REDIS_URL": "x"}}, "environment"),
        ({"environment": {"A": "x" * 4097}}, "environment.A"),
        ({"environment": {"A": "x"}, "secrets": {"A": "local:/x"}}, "secrets.A"),
        ({"processes": 0}, "processes"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_without_its_value(
    tmp_path: Path, folder: Path, given: dict[str, Any], field: str
) -> None:
    write_class(folder, READS)
    (folder / "schema.json").write_text(inspect_folder(folder).interface.as_json)
    entry = {"name": "mine", "task": "custom", "source": f"local:{folder}", **given}
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [entry]}))
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(path)
    assert field in caught.value.message
    assert TOKEN not in caught.value.message


def test_other_models_have_none(tmp_path: Path) -> None:
    entry = {
        **{"name": "mini", "task": "embedding", "source": "hf:a/b", "dimensions": 4},
        **{"batch": {"max_tokens": 8}, "environment": {"A": "b"}},
    }
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": [entry]}))
    with pytest.raises(
        ConfigurationError, match="environment: not supported by an embedding model"
    ):
        read_catalog(tmp_path / "models.yaml")


def test_a_secret_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    write_class(folder, READS)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    places = {
        f"local:{tmp_path}/none": "No such file",
        f"local:{tmp_path}/empty": "is empty",
        f"local:{tmp_path}/binary": "not valid UTF-8",
        "kubernetes:tokens/hub": "not available on this worker",
        "kubernetes:a/key": "not available on this worker",
    }
    for place, reason in places.items():
        entry = entry_of(folder, secrets={"TOKEN": place})
        with pytest.raises(ConfigurationError, match=reason) as caught:
            run_once(entry, folder)
        assert caught.value.message.startswith(f"secrets.TOKEN: {place}: ")


def test_a_secret_of_kubernetes_comes_by_the_variable_of_the_manifests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(folder, READS)
    reference = "kubernetes:tokens/hub"
    variable = SecretReference.parse(reference).variable
    monkeypatch.setenv(variable, TOKEN)
    entry = entry_of(folder, secrets={"TOKEN": reference})
    found = run_once(entry, folder, names=["TOKEN", variable])
    assert found == {"TOKEN": TOKEN, variable: None}, "it has the secret by its own name only"


def test_the_operator_may_pass_proxies_and_certificates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(folder, READS)
    names = ["HTTPS_PROXY", "SSL_CERT_FILE", "OTHER"]
    for name in names:
        monkeypatch.setenv(name, f"of {name}")
    assert run_once(entry_of(folder), folder, names=names) == dict.fromkeys(names)
    monkeypatch.setenv("PENSTOCK_CLASS_VARIABLES", "HTTPS_PROXY, SSL_CERT_FILE,NOT_SET")
    expected = {"HTTPS_PROXY": "of HTTPS_PROXY", "SSL_CERT_FILE": "of SSL_CERT_FILE", "OTHER": None}
    assert run_once(entry_of(folder), folder, names=names) == expected
    monkeypatch.setenv("PENSTOCK_CLASS_VARIABLES", "PENSTOCK_REDIS_URL")
    with pytest.raises(
        ConfigurationError, match=r"PENSTOCK_CLASS_VARIABLES: .*not passed to classes"
    ):
        read_settings(ClassSettings)


def test_commands_give_a_class_what_its_entry_says(
    folder: Path,
    secret: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = "WANTED = os.environ['WANTED'] + os.environ['TOKEN']\n" + READS.replace(
        "return {name: os.environ.get(name) for name in names}", "return {'all': WANTED}"
    )
    write_class(folder, body)
    entry: dict[str, Any] = {"name": "mine", "task": "custom", "source": f"local:{folder}"}
    entry |= {"environment": {"WANTED": "x"}, "secrets": {"TOKEN": secret}}
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [entry]}))
    with pytest.raises(ConfigurationError, match="WANTED"):
        inspect_folder(folder)
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(path))
    inspect_folder(folder)
    predict(folder, [], tmp_path)
    assert json.loads(capsys.readouterr().out) == {"all": "x" + TOKEN}
    Path(secret.removeprefix("local:")).unlink()
    folder.joinpath("predict.py").write_text(HEAD + READS)
    (note,) = inspect_folder(folder).notes
    assert note.startswith(f"secrets.TOKEN: {secret}: No such file")
    with pytest.raises(ConfigurationError, match=r"secrets\.TOKEN"):
        predict(folder, [], tmp_path)


def test_entries_whose_folder_can_not_exist_are_skipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = ["local:~no-such-user/x", "local:\0", f"local:{folder}"]
    entries = [{"source": source, "environment": {"A": source}} for source in sources[:2]]
    entries.append({"source": sources[2], "environment": {"A": "mine"}})
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": entries}))
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(tmp_path / "models.yaml"))
    assert entry_variables(folder).environment == {"A": "mine"}


def test_a_secret_of_a_user_who_does_not_exist_is_named(folder: Path) -> None:
    entry = EntryVariables(secrets={"TOKEN": "local:~no-such-user/token"})
    with pytest.raises(ConfigurationError, match=r"secrets\.TOKEN: .*No such file"):
        variables_of(folder, entry)


def test_a_class_is_measured_with_its_variables(
    folder: Path, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class(folder, "WANTED = os.environ['TOKEN']\n" + READS)
    entry = {"name": "mine", "task": "custom", "source": f"local:{folder}"}
    (tmp_path / "models.yaml").write_text(
        yaml.safe_dump({"models": [entry | {"secrets": {"TOKEN": secret}}]})
    )
    monkeypatch.setenv("PENSTOCK_MODELS_FILE", str(tmp_path / "models.yaml"))
    interface = inspect_folder(folder).interface
    conditions = Conditions(repeats=1, uses_gpu=False)
    assert measure(folder, interface, read_inputs(interface, [], None), conditions).batches


class SecretManager(BaseHTTPRequestHandler):
    """Responds to this request as Secret Manager would."""

    def do_GET(self) -> None:
        """Serves an existing version, a missing one, one that fails, and one with garbage
        content.
        """
        status, body = {
            "/v1/projects/p/secrets/there/versions/2:access": (
                200,
                {"payload": {"data": base64.b64encode(TOKEN.encode()).decode()}},
            ),
            "/v1/projects/p/secrets/fails/versions/1:access": (503, {}),
            "/v1/projects/p/secrets/other/versions/1:access": (200, {}),
        }.get(self.path, (404, {"error": {"message": "not found"}}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keeps request logs out of the output."""


@pytest.fixture
def secret_manager() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), SecretManager)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_versions_of_secret_manager(secret_manager: str) -> None:
    def read(name: str, url: str = secret_manager) -> bytes:
        version = f"projects/p/secrets/{name}"
        return read_google_secret(version, "secrets.TOKEN", url, AnonymousCredentials())

    assert read("there/versions/2") == TOKEN.encode()
    with pytest.raises(ConfigurationError, match="returned 404: the version does not exist"):
        read("there/versions/3")
    for name in ("fails/versions/1", "other/versions/1"):
        with pytest.raises(ModelFailed, match=r"secrets\.TOKEN: Secret Manager returned"):
            read(name)
    with pytest.raises(ModelFailed, match="is unreachable"):
        read("there/versions/2", "http://127.0.0.1:1")


def test_a_local_secret_may_be_readable_by_its_owner_only(folder: Path, secret: str) -> None:
    write_class(folder, READS)
    path = Path(secret.removeprefix("local:"))
    path.chmod(stat.S_IRUSR)
    entry = entry_of(folder, secrets={"TOKEN": secret})
    assert run_once(entry, folder, names=["TOKEN"]) == {"TOKEN": TOKEN}
