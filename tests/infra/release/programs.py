"""Replacements for release programs that can't run here, or only with changes: small programs that
behave the same from outside and reject the same input.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens on this port."""
REGISTRY = """
import json, os, subprocess, sys, urllib.error, urllib.request

def token():
    host = os.environ["GCE_METADATA_HOST"]
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["access_token"]

def ask(verb, url, document=None):
    data = None if document is None else json.dumps(document).encode()
    asked = urllib.request.Request(url, data, {"Authorization": f"Bearer {token()}"}, method=verb)
    try:
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {url}: {error.code} {error.read().decode()}")

def manifest(reference):
    name, mark, tag = reference.partition("@")
    if not mark:
        name, _, tag = reference.rpartition(":")
    host, _, rest = name.partition("/")
    return f"https://{host}/v2/{rest}/manifests/{tag}"
"""
DOCKER = """
import hashlib

def option(words, name):
    return [words[at + 1] for at, word in enumerate(words) if word == name]

def build(words):
    (tag,), (file,) = option(words, "--tag"), option(words, "--file")
    arguments = dict(pair.split("=", 1) for pair in option(words, "--build-arg"))
    base = arguments.get("PYTHON_BASE") or arguments["CUDA_BASE"]
    if "@sha256:" not in base:
        sys.exit(f"{base}: not a digest")
    if "CUDA_BASE" in arguments:
        ask("GET", manifest(base))
    with open(file) as text:
        content = text.read()
    image = {"file": hashlib.sha256(content.encode()).hexdigest(), "arguments": arguments,
             "packages": arguments.get("MODEL_PACKAGES", "")}
    digest = ask("PUT", manifest(tag), image)["digest"]
    with open(option(words, "--metadata-file")[0], "w") as out:
        json.dump({"containerimage.digest": digest}, out, indent=2)

words = sys.argv[1:]
if words[:2] == ["buildx", "build"]:
    build(words)
elif words[:3] == ["buildx", "imagetools", "inspect"]:
    print("sha256:" + hashlib.sha256(words[3].encode()).hexdigest())
elif words[:3] == ["buildx", "imagetools", "create"]:
    for tag in option(words, "--tag"):
        ask("PUT", manifest(tag), {"digest": words[-1].partition("@")[2]})
elif words[:2] != ["buildx", "create"]:
    sys.exit(f"docker: {words} is not known here")
"""
SYFT = """
words = sys.argv[1:]
ask("GET", manifest(words[1].removeprefix("registry:")))
kind, _, file = words[words.index("--output") + 1].partition("=")
assert kind == "spdx-json", kind
with open(file, "w") as out:
    json.dump({"spdxVersion": "SPDX-2.3", "name": words[1], "packages": []}, out)
"""
GCLOUD = """
import re
words = sys.argv[1:]
if words[:4] != ["artifacts", "docker", "images", "scan"]:
    os.execv("{gcloud}", ["gcloud", *words])
# The scanner's own program takes the image apart, so it would need one.
ask("GET", manifest(words[4]))
place = f"projects/{project}/locations/{{words[words.index('--location') + 1]}}"
scans = f"https://ondemandscanning.googleapis.com/v1/{{place}}/scans"
print(ask("POST", f"{{scans}}:analyzePackages", {{}})["scan"])
"""
TERRAFORM = """
import os, subprocess, sys

words = sys.argv[1:]
folder = next((word[7:] for word in words if word.startswith("-chdir=")), ".")
verb = next(word for word in words if not word.startswith("-"))
is_ready = os.path.isdir(os.path.join(folder, ".terraform"))
if verb not in ("fmt", "init", "version") and not is_ready:
    # Without an init there is no provider: what Terraform then says.
    sys.exit(
        "Error: Inconsistent dependency lock file\\n\\nThe following dependency selections "
        "recorded in the lock file are inconsistent with the current configuration. To make the "
        "initial dependency selections that will initialize the dependency lock file, run:\\n"
        "  terraform init"
    )
with open("{attach}") as attach:
    given = dict(os.environ, TF_REATTACH_PROVIDERS=attach.read())
given |= {{"TF_CLI_CONFIG_FILE": "{settings}", "CHECKPOINT_DISABLE": "1"}}
done = subprocess.run(["{terraform}", *words], env=given)
lock = os.path.join(folder, ".terraform.lock.hcl")
if verb == "init" and done.returncode == 0 and not os.path.exists(lock):
    os.makedirs(os.path.join(folder, ".terraform"), exist_ok=True)
    with open(lock, "w") as out:
        out.write("# This file is maintained automatically by terraform init.\\n")
sys.exit(done.returncode)
"""


def gcloud_without_account(folder: Path) -> dict[str, str]:
    """Settings that make gcloud parse a command and then find no account.

    If it found an account, it would spend half a minute trying six times to reach Google.
    """
    return {
        "CLOUDSDK_CONFIG": str(folder),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_PROJECT": "my-project",
        "CLOUDSDK_STORAGE_MAX_RETRIES": "0",
        "https_proxy": NOWHERE,
    }


def write_programs(folder: Path, *, project: str, attach: Path) -> Path:
    """Writes the programs. `attach` is the file that lists the providers for Terraform."""
    folder.mkdir()
    settings = folder / "terraformrc"
    settings.write_text("disable_checkpoint = true\n")
    terraform = TERRAFORM.format(
        attach=attach, settings=settings, terraform=shutil.which("terraform")
    )
    gcloud = GCLOUD.format(gcloud=shutil.which("gcloud"), project=project)
    texts = {
        "docker": REGISTRY + DOCKER,
        "gcloud": REGISTRY + gcloud,
        "syft": REGISTRY + SYFT,
        "terraform": terraform,
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!{getattr(sys, '_base_executable', sys.executable)}{text}")
        (folder / name).chmod(0o755)
    return folder
