"""Twenty classes that people might write to wrap a server, a command, or a download in `setup`.

The programs they start are stand-ins of a few lines each, with the same names and usage as the real
ones. Nothing in the classes depends on where they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

TOOLS = '''
import http.server, json, os, pathlib, shutil, subprocess, sys, time, urllib.request


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = asked.get("prompt", "")
        if "save" in asked:
            pathlib.Path(asked["save"]).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(asked["save"]).write_text(text.upper())
        self.answer({"text": text.upper()})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def listen(port):
    http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def option(name, default=None):
    for number, word in enumerate(sys.argv):
        if word == name:
            return sys.argv[number + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return default


def serve():
    """As vllm serve MODEL --port N, and others."""
    model = option("--model", option("--model-repository", option("-m", sys.argv[-1])))
    if "/" in model and not os.path.exists(model):
        sys.exit(f"no model {model}")
    time.sleep(0.2)
    listen(option("--port", "8000"))


def launch():
    """As accelerate launch [OPTIONS] SCRIPT [ARGUMENTS]."""
    at = next(number for number, word in enumerate(sys.argv) if word.endswith(".py"))
    sys.exit(subprocess.call([sys.executable, *sys.argv[at:]]))


def run_many():
    """As torchrun --nproc_per_node=N SCRIPT."""
    count = int(option("--nproc_per_node", "1"))
    running = [
        subprocess.Popen([sys.executable, *sys.argv[2:]], env={**os.environ, "RANK": str(rank)})
        for rank in range(count)
    ]
    sys.exit(max(one.wait() for one in running))


def fetch():
    """As pget URL DESTINATION."""
    url, destination = [word for word in sys.argv[1:] if not word.startswith("-")]
    with urllib.request.urlopen(url) as source, open(destination + ".part", "wb") as file:
        shutil.copyfileobj(source, file)
    os.rename(destination + ".part", destination)


def upper():
    """As ffmpeg -i - -: from stdin to stdout."""
    sys.stdout.write(sys.stdin.read().upper())
'''
"""The module in the `tools` package, which the classes require."""
COMMANDS = {
    "vllm": "serve",
    "tritonserver": "serve",
    "accelerate": "launch",
    "torchrun": "run_many",
    "pget": "fetch",
    "ffmpeg": "upper",
}
"""The package's commands, and the functions they call."""
HEAD = """
import json, os, pathlib, shutil, signal, subprocess, sys, tempfile, time, urllib.request
from cog import BasePredictor, Input, Path

PORT = {port}


def post(port, **body):
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{{port}}/generate", data, timeout=60) as answer:
        return json.load(answer)["text"]


def wait(port, process=None):
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{{port}}/health", timeout=5).read()
        except OSError:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the server ended with {{process.returncode}}")
            time.sleep(0.05)
"""
SERVER = "import sys\nfrom tools import listen\nlisten(sys.argv[sys.argv.index('--port') + 1])\n"


class Wrapper(NamedTuple):
    """A class: its code, which comes after HEAD, and its other files, keyed by path.

    Each class responds to `text` with TEXT.

    Attributes:
        body: the code for predict.py. `{port}` and `{source}` are a free port and a download URL.
        files: contents by path. Files whose names end in `.sh` or have no suffix are programs.
        needs_src: True if the code names /src.
    """

    body: str
    files: Mapping[str, str] = MappingProxyType({})
    needs_src: bool = False

    def written(self, port: int, source: str) -> dict[str, str]:
        values: dict[str, Any] = {"port": port}
        files = {"predict.py": HEAD.format(**values) + self.body, **self.files}
        return {
            name: text.replace("SOURCE_URL", source).replace("THE_PORT", str(port))
            for name, text in files.items()
        }


WRAPPERS = {
    "comfyui": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        self.server = subprocess.Popen(
            ["python", "main.py", "--listen", "127.0.0.1", "--port", str(PORT)], cwd="ComfyUI"
        )
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        post(PORT, prompt=text, save="output/result.txt")
        return open("ComfyUI/output/result.txt").read()
""",
        {"ComfyUI/main.py": SERVER, "ComfyUI/output/.keep": ""},
    ),
    "comfyui at /src": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        os.makedirs("/src/ComfyUI/models", exist_ok=True)
        command = f"cd /src/ComfyUI && python main.py --port {PORT}"
        self.server = subprocess.Popen(command, shell=True)
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        post(PORT, prompt=text, save="/src/ComfyUI/output/result.txt")
        return open("/src/ComfyUI/output/result.txt").read()
""",
        {"ComfyUI/main.py": SERVER},
        needs_src=True,
    ),
    "vllm serve": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        os.makedirs("weights", exist_ok=True)
        self.server = subprocess.Popen(["vllm", "serve", "./weights", "--port", str(PORT)])
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
"""
    ),
    "vllm module": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        command = [sys.executable, "-c", "from tools import serve; serve()", "--model", "tiny"]
        self.server = subprocess.Popen([*command, "--port", str(PORT)], start_new_session=True)
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
"""
    ),
    "ollama": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        os.environ["OLLAMA_HOST"] = f"127.0.0.1:{PORT}"
        os.environ["OLLAMA_MODELS"] = os.path.join(os.path.dirname(__file__), "models")
        self.server = subprocess.Popen(["./ollama", "serve"], stdout=subprocess.DEVNULL)
        wait(PORT, self.server)
        subprocess.check_call(["./ollama", "pull", "tiny"])

    def predict(self, text: str) -> str:
        assert os.listdir("models") == ["tiny"]
        return post(PORT, prompt=text)
""",
        {
            "ollama": """#!/bin/sh
case "$1" in
  serve) exec python3 -c "from tools import listen; listen(\\"${OLLAMA_HOST#*:}\\")" ;;
  pull) mkdir -p "$OLLAMA_MODELS" && echo weights > "$OLLAMA_MODELS/$2" ;;
esac
"""
        },
    ),
    "llama-server": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        here = pathlib.Path(__file__).resolve().parent
        urllib.request.urlretrieve("SOURCE_URL", here / "model.gguf")
        os.chmod(here / "bin/llama-server", 0o755)
        command = [str(here / "bin/llama-server"), "-m", str(here / "model.gguf")]
        self.server = subprocess.Popen([*command, "--port", str(PORT)])
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
""",
        {"bin/llama-server": '#!/bin/sh\nexec python -c "from tools import serve; serve()" "$@"\n'},
    ),
    "tritonserver": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        repository = "--model-repository=/src/triton"
        self.server = subprocess.Popen(["tritonserver", repository, f"--port={PORT}"])
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
""",
        {"triton/config": "of a model"},
        needs_src=True,
    ),
    "accelerate launch": Wrapper(
        """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        if os.path.exists("out"):
            shutil.rmtree("out")
        command = ["accelerate", "launch", "--num_processes", "1", "train.py"]
        subprocess.run([*command, "--prompt", text, "--output_dir", "out"], check=True)
        return open("out/result").read()
""",
        {
            "train.py": """
import os, sys
os.makedirs(sys.argv[4])
open(sys.argv[4] + "/result", "w").write(sys.argv[2].upper())
"""
        },
    ),
    "torchrun": Wrapper(
        """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        subprocess.check_call(["torchrun", "--nproc_per_node=2", "part.py", text])
        return "".join(open(f"part-{rank}").read() for rank in range(2))
""",
        {
            "part.py": """
import os, sys
rank, text = int(os.environ["RANK"]), sys.argv[1].upper()
open(f"part-{rank}", "w").write(text[rank * 2 : rank * 2 + 2])
"""
        },
    ),
    "pget": Wrapper(
        """
WEIGHTS = "weights-cache"

class Predictor(BasePredictor):
    def setup(self):
        if not os.path.exists(WEIGHTS):
            start = time.time()
            subprocess.check_call(["pget", "-x", "SOURCE_URL", WEIGHTS], close_fds=False)
            print("downloading took:", time.time() - start)
        self.mapping = json.loads(open(WEIGHTS).read())

    def predict(self, text: str) -> str:
        return text.translate({int(key): value for key, value in self.mapping.items()})
"""
    ),
    "download beside the file": Wrapper(
        """
CACHE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints", "model")

class Predictor(BasePredictor):
    def setup(self):
        os.system("python download.py")
        with open(CACHE) as file:
            self.mapping = json.load(file)

    def predict(self, text: str) -> str:
        return text.translate({int(key): value for key, value in self.mapping.items()})
""",
        {
            "checkpoints/.keep": "",
            "download.py": """
import pathlib, urllib.request
urllib.request.urlretrieve("SOURCE_URL", pathlib.Path(__file__).parent / "checkpoints/model")
""",
        },
    ),
    "cache of a hub": Wrapper(
        """
os.environ["HF_HOME"] = os.path.join(os.getcwd(), ".cache", "huggingface")

class Predictor(BasePredictor):
    def setup(self):
        blobs = pathlib.Path(os.environ["HF_HOME"], "hub", "blobs")
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs.parent / "refs").write_text("main")
        urllib.request.urlretrieve("SOURCE_URL", blobs / "1")
        if not os.path.lexists(blobs.parent / "model"):
            os.symlink("blobs/1", blobs.parent / "model")
        self.mapping = json.loads((blobs.parent / "model").read_text())

    def predict(self, text: str) -> str:
        return text.translate({int(key): value for key, value in self.mapping.items()})
""",
        {".cache/huggingface/hub/refs": "older"},
    ),
    "shell script": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        subprocess.run("bash scripts/setup.sh", shell=True, check=True)
        sys.path.append("repo")
        from generated import turn
        self.turn = turn

    def predict(self, text: str) -> str:
        return self.turn(text)
""",
        {
            "scripts/setup.sh": """#!/bin/bash
set -e
mkdir -p repo
echo 'def turn(text): return text.upper()' > repo/generated.py
python -c 'import tools'
"""
        },
    ),
    "patched source": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        path = pathlib.Path("vendor/model.py")
        path.write_text(path.read_text().replace("lower", "upper"))
        sys.path.insert(0, str(path.parent.absolute()))
        import model
        self.model = model

    def predict(self, text: str) -> str:
        return self.model.turn(text)
""",
        {"vendor/model.py": "def turn(text):\n    return text.lower()\n"},
    ),
    "ffmpeg": Wrapper(
        """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        assert shutil.which("ffmpeg")
        return subprocess.check_output(["ffmpeg", "-i", "-", "-"], input=text, text=True)
"""
    ),
    "worker by pipes": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        self.worker = subprocess.Popen(
            ["python3", "-u", "worker.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.worker.stdout.readline() == "ready\\n"

    def predict(self, text: str) -> str:
        print(json.dumps(text), file=self.worker.stdin, flush=True)
        return json.loads(self.worker.stdout.readline())
""",
        {
            "worker.py": """
import json, sys
print("ready")
for line in sys.stdin:
    print(json.dumps(json.loads(line).upper()))
"""
        },
    ),
    "server in a thread": Wrapper(
        """
import threading

class Predictor(BasePredictor):
    def setup(self):
        from tools import listen
        threading.Thread(target=listen, args=(PORT,), daemon=True).start()
        wait(PORT)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
"""
    ),
    "server in a process": Wrapper(
        """
import multiprocessing

def run(port):
    from tools import listen
    listen(port)

class Predictor(BasePredictor):
    def setup(self):
        context = multiprocessing.get_context("spawn")
        self.server = context.Process(target=run, args=(PORT,), daemon=True)
        self.server.start()
        wait(PORT)

    def predict(self, text: str) -> str:
        return post(PORT, prompt=text)
"""
    ),
    "installs at setup": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        subprocess.check_call(["python", "install.py", "--target", "deps"])
        sys.path.append(os.path.abspath("deps"))
        import added
        self.added = added

    def predict(self, text: str) -> str:
        return self.added.turn(text)
""",
        {
            "install.py": """
import os, sys
os.makedirs(sys.argv[2], exist_ok=True)
open(sys.argv[2] + "/added.py", "w").write("def turn(text): return text.upper()")
"""
        },
    ),
    "files through a server": Wrapper(
        """
class Predictor(BasePredictor):
    def setup(self):
        self.output = tempfile.mkdtemp()
        environment = {**os.environ, "OUTPUT": self.output}
        self.server = subprocess.Popen(
            ["python", os.path.join(os.path.dirname(__file__), "server.py"), "--port", str(PORT)],
            env=environment,
            stdout=open("server.log", "w"),
            stderr=subprocess.STDOUT,
            preexec_fn=os.setsid,
        )
        wait(PORT, self.server)

    def predict(self, text: str) -> str:
        place = os.path.join(self.output, "result")
        post(PORT, prompt=text, save=place)
        return open(place).read()
""",
        {"server.py": SERVER},
    ),
}
