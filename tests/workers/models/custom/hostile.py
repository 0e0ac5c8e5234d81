"""A class that does, one at a time, everything a class shouldn't, and how each prediction ends."""

from __future__ import annotations

HOSTILE = '''
import glob, signal, socket, struct, json, subprocess

KEPT = []


def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def write(data):
    for fd in sockets():
        try:
            os.write(fd, data)
        except OSError:
            pass


def readable_environments():
    """Of processes that are not ours, as far as the system shows them."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        namespace = path.replace("environ", "ns/mnt")
        try:
            if os.readlink(namespace) == os.readlink("/proc/self/ns/mnt"):
                continue  # one of its own children
        except OSError:
            pass
        for name in ("environ", "mem", "maps"):
            try:
                with open(path.replace("environ", name), "rb") as file:
                    if file.read(1):  # threads of the system have none
                        found.append(path)
            except OSError:
                pass
    return found


# Without a mount namespace, /tmp is shared: it may write there, and files may not be counted.
HAS_NAMESPACE = Path("/src").is_dir()
COUNTED_TMP = "/tmp" if HAS_NAMESPACE else os.environ["TMPDIR"]


class Predictor(BasePredictor):
    def predict(self, mode: str) -> Any:
        print(f"it does {mode}")
        return getattr(self, mode)()

    def behave(self):
        return "well"

    def loop(self):
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass

    def stop_itself(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def print_on(self):
        while True:
            try:
                os.write(1, b"x" * 65536)
            except BaseException:
                pass

    def name_itself(self):
        return os.getpid()

    def leak(self):
        KEPT.append(b"x" * 2**30)
        time.sleep(30)
        return len(KEPT)

    def leak_less(self):
        KEPT.append(b"x" * (300 * 2**20))
        return len(KEPT) > 0

    def leak_in_a_child(self):
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; kept = b'x' * 2**30; time.sleep(60)"]
        )
        child.wait()
        return child.returncode

    def leave(self):
        os._exit(4)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def fork(self):
        return len(self.leave_children())

    def leave_children(self):
        reads, writes = os.pipe()
        for number in range(3):
            child = os.fork()
            if not child:
                if number and HAS_NAMESPACE:
                    os.setsid()  # it leaves the session
                if os.fork():
                    os._exit(0)  # and its parent leaves it
                try:
                    os.write(writes, f"{os.getpid()} ".encode())
                    time.sleep(600)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        told = b""
        while told.count(b" ") < 3:
            told += os.read(reads, 100)
        return [os.getpid(), *map(int, told.split())]

    def fork_on(self):
        for _ in range(600):
            if not os.fork():
                time.sleep(600)
                os._exit(0)
        time.sleep(60)

    def print_much(self):
        for _ in range(1000):
            print("p" * 100_000)
        print("the end")
        return "printed"

    def fill_disk(self, folder="."):
        for number in range(200):  # far above the bound, but no end of the machine
            with open(f"{folder}/{number}.bin", "wb") as file:
                file.write(bytes(8 * 2**20))
        time.sleep(60)

    def fill_tmp(self):
        self.fill_disk(COUNTED_TMP)

    def fill_by_a_child(self):
        command = "for i in $(seq 200); do head -c 8388608 /dev/zero > child-$i; done; sleep 60"
        subprocess.run(["sh", "-c", command])

    def fill_what_is_removed(self):
        for number in range(200):
            KEPT.append(open(f"{number}.bin", "wb"))
            Path(f"{number}.bin").unlink()
            KEPT[-1].write(bytes(8 * 2**20))
        time.sleep(60)

    def fill_tmp_by_open_files(self):
        for number in range(200):
            KEPT.append(open(f"/tmp/{number}.bin", "wb"))
            KEPT[-1].write(bytes(8 * 2**20))
        time.sleep(60)

    def fill_one_file(self):
        with open("one.bin", "wb") as file:
            for _ in range(200):
                file.write(bytes(8 * 2**20))

    def leave_files(self):
        with open(f"{COUNTED_TMP}/{time.monotonic_ns()}.bin", "wb") as file:
            file.write(bytes(20 * 2**20))
        return "left"

    def large_file(self):
        path = Path("large.bin")
        with path.open("wb") as file:
            file.truncate(300 * 2**20)
        return path

    def large_files(self):
        paths = []
        for number in range(6):
            path = Path(f"{number}.bin")
            with path.open("wb") as file:
                file.truncate(60 * 2**20)
            paths.append(path)
        return {"files": paths}

    def wrong_type(self):
        return object()

    def look_around(self):
        return readable_environments()

    def secrets(self):
        return sorted(name for name in os.environ if "PENSTOCK" in name or "KEY" in name)

    def write_outside(self):
        done = []
        for place in [*PLACES, "/var/tmp", "/etc", "/"]:
            if place.startswith("/tmp/") and not HAS_NAMESPACE:
                continue
            try:
                path = Path(place) / "written-by-a-class"
                path.write_text("x")
                done.append(str(path))
            except OSError:
                pass
        return done

    def write_inside(self):
        for place in (".", "/tmp", os.environ["HOME"], os.environ["TMPDIR"], "/dev/shm"):
            path = Path(place) / "inside.txt"
            path.write_text("x")
            path.unlink()
        return open("predict.py").readline() + "read"

    def kill_parent(self):
        os.kill(os.getppid(), signal.SIGKILL)
        return "killed"

    def close_socket(self):
        for fd in sockets():
            os.close(fd)
        time.sleep(60)

    def close_socket_and_go_on(self):
        for fd in sockets():
            os.close(fd)
        return "closed"

    def write_garbage(self):
        write(b"\\xff" * 1000)
        time.sleep(60)

    def write_frames(self):
        for message in ({"id": "x", "blobs": []}, {"blobs": [], "piece": 1}, {"blobs": []}):
            body = json.dumps(message).encode()
            write(struct.pack("<I", len(body)) + body)
        time.sleep(60)

    def place_files(self):
        message = {"id": ID, "output": 1, "metrics": {}, "blobs": [1],
                   "files": [{"at": ["a"], "name": "a", "media_type": "a/b"}]}
        for number in range(1, 1000):
            body = json.dumps(message | {"id": number}).encode()
            write(struct.pack("<I", len(body)) + body + b"x")
        time.sleep(60)
'''

ENDED = "the model process was killed while processing this item: "
DISK_BYTES = 310 * 1024 * 1024
FILLED = f"{ENDED}it wrote more than the maximum of {DISK_BYTES} bytes to disk"
ENDINGS: dict[str, tuple[str, object]] = {
    "leak": ("failed", f"{ENDED}it uses "),
    "leak_in_a_child": ("failed", f"{ENDED}it uses "),
    "leave": ("failed", "the model process exited with status 4 while"),
    "crash": ("failed", "the model process was killed by signal 11 (SIGSEGV) while"),
    "fork": ("succeeded", 4),
    "print_much": ("succeeded", "printed"),
    "fill_disk": ("failed", FILLED),
    "fill_tmp": ("failed", FILLED),
    "fill_tmp_by_open_files": ("failed", FILLED),
    "fill_by_a_child": ("failed", FILLED),
    "fill_what_is_removed": ("failed", FILLED),
    "fill_one_file": ("failed", f"it wrote more than the maximum of {DISK_BYTES} bytes to a file"),
    "large_file": (
        "failed",
        "output: the file large.bin exceeds the maximum of 67108864 bytes",
    ),
    "large_files": ("failed", "output: total file size exceeds the maximum of"),
    "wrong_type": ("failed", "output: a value of type object can't be sent as JSON"),
    "look_around": ("succeeded", []),
    "secrets": ("succeeded", []),
    "write_outside": ("succeeded", []),
    "write_inside": ("succeeded", "\nread"),
    "kill_parent": ("failed", "PermissionError: [Errno 1] Operation not permitted"),
    "close_socket": ("failed", f"{ENDED}it closed its connection to the worker"),
    "close_socket_and_go_on": ("failed", "the model process exited with status 1"),
    "write_garbage": ("failed", f"{ENDED}it sent an invalid response"),
    "write_frames": ("failed", f"{ENDED}it sent an invalid response"),
    "place_files": ("failed", f"{ENDED}it sent an invalid response"),
}
"""The prediction's status, and its output or the start of its error, keyed by action."""
ENDLESS = ("loop", "stop_itself", "print_on")
"""Methods that run until the deadline."""
MEMORY_BYTES = 800 * 1024 * 1024
RESOURCES = {"memory_bytes": MEMORY_BYTES, "disk_bytes": DISK_BYTES}


def hostile_class(places: list[str]) -> str:
    """Returns the class's source.

    Args:
        places: folders outside the class folder that the class tries to write to.
    """
    return f"PLACES = {places!r}\nID = 1\n{HOSTILE}"
