"""Records sample.ogg in headless Chromium: `record.py`, with chromium and ffmpeg on the PATH.

Chromium uses a file as its microphone, and its MediaRecorder creates the recordings. Writes
chromium.webm and chromium.mp4 to this folder.
"""

from __future__ import annotations

import base64
import subprocess
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

FOLDER = Path(__file__).parent
LIMIT_S = 60.0
PAGE = """<script>
async function record(kind) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const options = { mimeType: "audio/" + kind, audioBitsPerSecond: 12000 };
  const recorder = new MediaRecorder(stream, options);
  const chunks = [];
  recorder.ondataavailable = (event) => chunks.push(event.data);
  const stopped = new Promise((done) => { recorder.onstop = done; });
  recorder.start(1000);
  setTimeout(() => recorder.stop(), 7000);
  await stopped;
  const bytes = new Uint8Array(await new Blob(chunks).arrayBuffer());
  await fetch("/" + kind, { method: "POST", body: btoa(String.fromCharCode(...bytes)) });
}
record("webm").then(() => record("mp4")).then(() => fetch("/done", { method: "POST" }));
</script>"""
DONE = Event()


class Handler(BaseHTTPRequestHandler):
    """Serves the page and writes what it records."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def do_POST(self) -> None:
        """Writes a recording, or ends the program."""
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        kind = self.path.removeprefix("/")
        if kind in ("webm", "mp4"):
            (FOLDER / f"chromium.{kind}").write_bytes(base64.b64decode(body))
        self.send_response(200)
        self.end_headers()
        if kind == "done":
            DONE.set()

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "microphone.wav"
        sample = FOLDER.parent / "sample.ogg"
        convert = ["ffmpeg", "-v", "error", "-i", str(sample), "-ar", "48000", str(sound)]
        subprocess.run(convert, check=True, timeout=LIMIT_S)
        command = ["chromium", "--headless=new", "--no-sandbox", f"--user-data-dir={folder}"]
        command += ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
        command += [f"--use-file-for-fake-audio-capture={sound}"]
        command += [f"http://127.0.0.1:{server.server_port}/"]
        browser = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        is_done = DONE.wait(LIMIT_S)
        browser.kill()
        browser.wait(LIMIT_S)
    server.shutdown()
    if not is_done:
        raise SystemExit("Chromium recorded nothing")


if __name__ == "__main__":
    main()
