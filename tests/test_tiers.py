"""A quick test that uses too much CPU time fails in CI, and is merely listed elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import START_LIMIT_S
from tests.tiers import MAX_NAMED_FILES, QUICK, SLOW, QuickTests, has_none_of

ROOT = Path(__file__).parents[1]
CONFTEST = """
import os
from tests.tiers import QuickTests

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    plugin = QuickTests(limit_s=0.3, is_enforced="CI" in os.environ)
    config.pluginmanager.register(plugin, "quick-tests")
"""
TESTS = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.6: pass"

@pytest.fixture(scope="session")
def shared():
    exec(BUSY)

@pytest.fixture
def own():
    exec("import time; end_s = time.process_time() + 0.6\\nwhile time.process_time() < end_s: pass")

def test_shares(shared): pass
def test_computes_in_its_setup(own): pass
def test_computes_in_a_child(): subprocess.run([sys.executable, "-c", BUSY], check=True)
def test_waits(): time.sleep(0.4)
def test_is_quick(): pass

@pytest.mark.slow
def test_is_slow(own): pass

@pytest.mark.skipif(True, reason="needs a tool")
def test_needs_a_tool(): pass

def test_needs_it_too(): pytest.skip("needs a tool")
"""


def run(folder: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    usual = {name: value for name, value in os.environ.items() if name != "CI"}
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env=usual | own | variables,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


WORKER = ("-p", "xdist", "-n", "1")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), WORKER], ids=["alone", "with a worker"])
@pytest.mark.parametrize("variables", [{}, {"CI": "true"}], ids=["anywhere", "in CI"])
def test_quick_tests_that_compute_long_fail_in_ci_only(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = run(tmp_path, *options, **variables)
    assert done.returncode == (1 if variables else 0), done.stdout + done.stderr
    head, _, named = done.stdout.partition("more than 0.3 s of CPU time without the mark slow")
    assert "failed" not in head
    named, _, skipped = named.partition(" skipped =")
    assert {line.rpartition("::")[2] for line in named.splitlines() if "::" in line} == {
        "test_computes_in_its_setup",
        "test_computes_in_a_child",
    }
    assert "    2 needs a tool (test_some.py)" in skipped


@pytest.mark.slow
def test_a_run_of_quick_tests_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "quick or slow or shares")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without the mark slow" not in done.stdout


def test_the_files_that_took_longest_come_first() -> None:
    tests = QuickTests()
    for number in range(MAX_NAMED_FILES + 3):
        for when in ("setup", "call"):
            name = f"tests/test_{number}.py::test_a"
            report = pytest.TestReport(
                name, ("", 0, ""), {}, "passed", None, when, duration=float(number)
            )
            tests.pytest_runtest_logreport(report)
    found = list(tests.longest_files.items())
    last = MAX_NAMED_FILES + 2
    assert found[0] == (f"tests/test_{last}.py", 2.0 * last)
    assert found[-1] == ("tests/test_3.py", 6.0)


def test_only_files_without_a_test_of_the_tier_are_left_out(tmp_path: Path) -> None:
    slow, quick = tmp_path / "slow", tmp_path / "quick"
    texts = {
        slow / "test_all.py": "pytestmark = pytest.mark.slow",
        slow / "test_also.py": "pytestmark = [\n    pytest.mark.slow,\n]",
        quick / "test_one.py": "@pytest.mark.slow\ndef test(): pass",
        quick / "test_none.py": "def test(): pass",
        quick / "test_property.py": "from hypothesis import given",
    }
    for file, text in texts.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    paths = [*texts, slow, quick, tmp_path]
    left_out = {slow / "test_all.py", slow / "test_also.py", slow}
    assert {path for path in paths if has_none_of(QUICK, path)} == left_out
    assert [path for path in paths if has_none_of(SLOW, path)] == [quick / "test_none.py"]
    assert not any(has_none_of("", path) for path in paths)


def test_the_makefile_names_the_tiers() -> None:
    made = (ROOT / "Makefile").read_text()
    assert f'-m "{QUICK}"' in made
    assert f'-m "{SLOW}"' in made


@pytest.mark.slow(about_s=10)
def test_collecting_quick_tests_imports_no_model_library() -> None:
    """Each process in a quick run would import them: torch and transformers take 3.8 s of CPU
    time.
    """
    program = f"""
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "-n", "0", "-m", {QUICK!r}])
heavy = {{"torch", "transformers", "diffusers", "onnx", "onnxruntime", "scipy.stats"}}
print(f"{{status:d}} {{sorted(heavy & sys.modules.keys())}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"
