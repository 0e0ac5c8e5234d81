"""A class's isolation: how much of our processes its code can see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.custom.runner.confinement import abi_version

ROOT = Path(__file__).parents[4]
AS_NOBODY = """
import ctypes, encodings.ascii, os, sys
sys.path.insert(0, sys.argv[1])
from shared.process.inspection import deny_inspection
if os.geteuid() == 0:
    os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a change of the user hides a process by itself
"""
SHOWN = AS_NOBODY + "print('ready', flush=True); sys.stdin.read()"
HIDDEN = AS_NOBODY + "deny_inspection(); print('ready', flush=True); sys.stdin.read()"
READER = AS_NOBODY + "print(open(f'/proc/{sys.argv[2]}/environ').read())"


@pytest.mark.parametrize(
    ("code", "found"),
    # With /proc's hidepid option, processes that can't be inspected are not listed either.
    [(SHOWN, "KEY=told"), (HIDDEN, "PermissionError|FileNotFoundError")],
    ids=["shown", "hidden"],
)
def test_a_process_of_the_same_user_cant_read_the_environment(code: str, found: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KEY": "told"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        command = [sys.executable, "-c", READER, str(ROOT), str(process.pid)]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        process.kill()
    assert re.search(found, asked.stdout + asked.stderr)


CUDA = """
import fcntl, glob, mmap, os, stat, sys, threading
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import confine
scratch = os.environ["HOME"] = sys.argv[2]
confine(scratch, [sys.prefix], max_file_bytes=2**30)

def tried(name, body):
    try:
        body()
        print("may", name)
    except OSError as error:
        print("refused", name, error)

def asks(path, request):
    fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(fd, request, bytes(8))

def maps(fd):
    mmap.mmap(fd, 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)[0] = 1

def memory():
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 1 << 20)
    maps(fd)

def shared():
    fd = os.open("/dev/shm/cuda-of-a-test", os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink("/dev/shm/cuda-of-a-test")
    os.ftruncate(fd, 1 << 20)
    maps(fd)

def names(thread):
    with open(f"/proc/self/task/{thread}/comm", "w") as file:
        file.write("cuda0001")

def names_another():
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), end.wait(60)))
    thread.start()
    try:
        names(thread.native_id)
    finally:
        end.set()
        thread.join()

TIOCGPTN = 0x80045430
tried("ask a device", lambda: asks("/dev/ptmx", TIOCGPTN))
tried("map a device", lambda: maps(os.open("/dev/zero", os.O_RDWR)))
tried("read the driver", lambda: os.listdir("/proc/driver"))
tried("read the bus", lambda: os.listdir("/sys/bus"))
tried("share memory", shared)
tried("share memory without a name", memory)
tried("name itself", lambda: names(os.getpid()))
tried("name a thread that began later", names_another)
tried("cache kernels", lambda: os.makedirs(os.path.expanduser("~/.nv/ComputeCache/1")))
for device in glob.glob("/dev/nvidia*"):
    if stat.S_ISCHR(os.stat(device).st_mode):
        tried("open a GPU", lambda: os.close(os.open(device, os.O_RDWR)))
tried("add a device", lambda: os.mknod("/dev/nvidia-of-a-test", 0o600))
"""


@pytest.mark.skipif(not abi_version(), reason="this system has no Landlock")
def test_what_cuda_needs_is_allowed(tmp_path: Path) -> None:
    """Checks the rules on devices that every machine has: their ioctls and maps, shared memory,
    caches.
    """
    command = [sys.executable, "-c", CUDA, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("refused")] == lines[-1:], lines
    assert lines[-1].startswith("refused add a device")
    assert len(lines) >= 10


RULES = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import restrict_writes
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no new privileges
restrict_writes([], files_of=[sys.argv[2]])
for name in ("nvidia0", "nvidia-caps/nvidia-cap1", "nvidia-uvm"):
    try:
        open(f"{sys.argv[2]}/{name}", "r+b" if name != "nvidia-uvm" else "wb").close()
        print("opened", name)
    except OSError:
        print("refused", name)
"""


@pytest.mark.skipif(not abi_version(), reason="this system has no Landlock")
def test_devices_in_folders_of_devices_may_be_opened_and_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    for name in ("nvidia0", "nvidia-caps/nvidia-cap1"):
        (tmp_path / name).touch()
    command = [sys.executable, "-c", RULES, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "opened nvidia0",
        "opened nvidia-caps/nvidia-cap1",
        "refused nvidia-uvm",
    ], done.stderr


CONFINED = """
import ctypes, encodings.ascii, os, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import confine
scratch, outside = sys.argv[2:4]
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after the start of a program
for one in confine(scratch, [sys.prefix]).missing:
    print("missing:", one)
for place in (scratch, "/tmp", outside):
    try:
        with open(f"{place}/told", "w") as file:
            file.write("x")
        print("wrote", place)
    except OSError as error:
        print("refused", place)
print(open("/proc/self/status").read() + open("/proc/self/limits").read())
"""


@pytest.mark.skipif(not abi_version(), reason="this system has no Landlock")
def test_a_user_without_rights_is_confined_as_well(tmp_path: Path) -> None:
    scratch, outside = tmp_path / "scratch", Path("/var/tmp")
    scratch.mkdir()
    scratch.chmod(0o777)
    for parent in [one for one in tmp_path.parents if one != Path("/")][:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", CONFINED, str(ROOT), str(scratch), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"wrote {scratch}" in lines, done.stdout
    assert "wrote /tmp" in lines
    assert f"refused {outside}" in lines
    assert "CapEff:\t0000000000000000" in lines
    assert any(line.startswith("Max core file size        0 ") for line in lines)
    if not any("namespace" in line for line in lines):
        assert (scratch / "tmp" / "told").read_text() == "x", "its /tmp is its own"


MOVES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import confine
scratch, outside = sys.argv[2:4]
confine(scratch, [sys.prefix], denied_ports=[1])
os.makedirs(f"{scratch}/a/b")
for old, new in (
    (f"{scratch}/a/b/file", f"{scratch}/file"),
    ("/tmp/moved-by-a-class", f"{scratch}/a/file"),
    (f"{scratch}/a/out", f"{outside}/moved-by-a-class"),
):
    open(old, "w").close()
    try:
        os.rename(old, new)
        print("moved")
    except OSError as error:
        print(type(error).__name__, error.strerror)
"""


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that is neither under /tmp nor in the scratch folder, wherever the clone is."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if Path("/tmp").resolve() in Path(folder).resolve().parents:
            pytest.skip("/var/tmp is below /tmp on this system")
        yield Path(folder)


@pytest.mark.skipif(abi_version() < 4, reason="Landlock 4 restricts connections (Linux 6.7)")
def test_files_are_moved_between_folders_as_caches_do(tmp_path: Path, outside: Path) -> None:
    """Triton compiles in a subfolder and moves the result up.

    No file is moved out of the folder.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", MOVES, str(ROOT), str(scratch), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    up, from_tmp, out = done.stdout.splitlines()
    assert up == "moved", done
    # If the class has its own /tmp, that /tmp is a separate mount, so files can't be renamed into
    # it, just as between two disks.
    assert from_tmp in ("moved", "OSError Invalid cross-device link")
    assert out in ("PermissionError Permission denied", "OSError Invalid cross-device link")
    assert not (outside / "moved-by-a-class").exists()


MOUNTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner.confinement import confine
scratch, folder, outside = sys.argv[2:5]
if os.geteuid() == 0 and sys.argv[5] == "as nobody":
    import ctypes
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after the start of a program
confine(scratch, [sys.prefix], folder=folder)
with open("/proc/self/mountinfo", encoding="utf-8") as lines:
    mounts = [(words[4], words[5].split(",")) for words in map(str.split, lines)]
below = [mount for mount, flags in mounts if mount.startswith(f"{scratch}/") and "rw" in flags]
print([mount for mount in below if mount != f"{scratch}/src"])
try:
    open(f"{outside}/told", "w").close()
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(not abi_version(), reason="this system has no Landlock")
@pytest.mark.parametrize("user", ["as root", "as nobody"])
@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp"])
def test_only_the_view_is_mounted_for_writing_below_the_scratch_folder(
    outside: Path, parent: str, user: str
) -> None:
    """Everything below that folder may be changed, even the root folders of a copy mounted there.

    The real root folders can't serve as a probe, so the mounts are listed instead.
    """
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        scratch = folder / "scratch"
        for place in (scratch, scratch / "src", folder / "class", outside):
            place.mkdir(exist_ok=True)
            place.chmod(0o777)
        command = [sys.executable, "-c", MOUNTS, str(ROOT)]
        command += [str(scratch), str(folder / "class"), str(outside), user]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "Permission denied"]


LOWER = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from workers.models.custom.runner import confinement
scratch, kept = sys.argv[2:4]
try:
    confinement._enter_namespace()
except OSError:
    sys.exit("no namespaces")
confinement._mount("none", "/", confinement._RECURSIVE | confinement._PRIVATE)
confinement._mount("tmpfs", f"{kept}/lower", 0, kind="tmpfs")
open(f"{kept}/lower/told", "w").close()
confinement.confine(scratch, [sys.prefix, kept])
for name in (f"{kept}/upper", f"{kept}/lower/told"):
    try:
        open(name, "w").close()
        print("wrote", name)
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a folder for the test")
def test_folders_mounted_below_a_kept_folder_are_read_only_too(below_tmp: Path) -> None:
    scratch = below_tmp / "scratch"
    weights = below_tmp / "weights"
    for place in (scratch, weights / "lower"):
        place.mkdir(parents=True)
    command = [sys.executable, "-c", LOWER, str(ROOT), str(scratch), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr == "no namespaces\n":
        pytest.skip("this system has no mount namespaces")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Read-only file system"] * 2


READS = """
import one, two, three
from near import four

class Predictor(BasePredictor):
    def predict(self, path: str) -> str:
        if path == "mounts":
            return os.readlink("/proc/self/ns/mnt")
        if path:
            return os.listdir(path).__repr__() if os.path.exists(path) else "not there"
        with open("large") as file:
            words = [one.WORD, two.WORD, three.WORD, four.WORD, file.read()]
        with open(os.environ["COG_WEIGHTS"] + "/w") as file:
            words.append(file.read())
        for name in ("one.py", "near/four.py"):
            try:
                open(f"{os.path.dirname(__file__)}/{name}", "a")
                words.append("written")
            except OSError:
                pass
        return " ".join(words)
"""


@pytest.fixture
def below_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def linked_class(below_tmp: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class folder under /tmp. Some of its files are links, and its path contains a link too.

    The links are relative and absolute; they point to files and folders inside and outside /tmp,
    through other links, and in a cycle.
    """
    folder, near = below_tmp / "real" / "class", below_tmp / "real" / "near"
    for place in (folder, near, below_tmp / "far", below_tmp / "hub" / "blobs"):
        place.mkdir(parents=True)
    for place, name in ((near, "one"), (below_tmp / "far", "two"), (outside, "three")):
        (place / f"{name}.py").write_text(f"WORD = {name!r}")
    (near / "four.py").write_text("from near.five import WORD")
    (below_tmp / "far" / "five.py").write_text("WORD = 'four'")
    (near / "five.py").symlink_to("../../far/five.py")
    write_class(folder, READS)
    (folder / "one.py").symlink_to("../near/one.py")
    (below_tmp / "passed").symlink_to(below_tmp / "far")
    (folder / "two.py").symlink_to(below_tmp / "passed" / "two.py")
    (folder / "three.py").symlink_to(outside / "three.py")
    (folder / "near").symlink_to("../near")
    (near / "circle").symlink_to("circle")
    (near / "back").symlink_to(folder)
    (near / "all").symlink_to("/tmp")
    (below_tmp / "far" / "large").write_text("large")
    (folder / "large").symlink_to("../../far/large")
    (below_tmp / "hub" / "blobs" / "w").write_text("weights")
    (outside / "snapshot").mkdir()
    (outside / "snapshot" / "w").symlink_to(below_tmp / "hub" / "blobs" / "w")
    monkeypatch.setenv("COG_WEIGHTS", str(outside / "snapshot"))
    (below_tmp / "way").symlink_to("real")
    return below_tmp / "way" / "class"


def put_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the temporary files of this process and its child processes to `folder`."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


@pytest.mark.parametrize("temporary", ["usual", "linked", "above the class"])
def test_a_class_below_tmp_has_what_its_links_lead_to(
    linked_class: Path, below_tmp: Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if temporary == "linked":
        (below_tmp / "of-runners").mkdir()
        (below_tmp / "t").symlink_to("of-runners")
        put_temporary_files(below_tmp / "t", monkeypatch)
    elif temporary == "above the class":
        (below_tmp / "real" / "near" / "above").symlink_to(below_tmp)
        put_temporary_files(below_tmp, monkeypatch)
    with StartedClass(entry_of(linked_class), linked_class) as model:
        words = output_of(compute(model, {"path": ""}))
        assert words == "one two three four large weights written written"
        assert (linked_class / "one.py").read_text() == "WORD = 'one'"
        if output_of(compute(model, {"path": "mounts"})) != os.readlink("/proc/self/ns/mnt"):
            with tempfile.TemporaryDirectory(dir="/tmp") as others:
                assert output_of(compute(model, {"path": others})) == "not there"
