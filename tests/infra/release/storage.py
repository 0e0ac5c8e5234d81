"""Cloud Storage, as gcloud and Terraform use it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any
from urllib.parse import quote

from google_crc32c import value as crc32c

from tests.infra.release.api import NUMBER, Api, Ask, Refusal, Reply, Stored, route

MEDIA = "https://storage.googleapis.com/download/storage/v1"
OF_THE_XML_API = r"/(?!(?:storage|upload|download|batch|resumable)/)([a-z0-9][^/]+)/(.+)"
"""`/BUCKET/OBJECT`, which is not a JSON API path."""


class Storage(Api):
    """Buckets and their contents."""

    def _bucket(self, name: str) -> dict[str, Stored]:
        if name not in self.buckets:
            raise Refusal(404, "The specified bucket does not exist.")
        return self.buckets[name]

    def _shown_bucket(self, name: str) -> dict[str, Any]:
        return {
            "kind": "storage#bucket",
            "id": name,
            "name": name,
            "projectNumber": NUMBER,
            "location": self.region.upper(),
            "locationType": "region",
            "storageClass": "STANDARD",
            "etag": "CAE=",
            "metageneration": "1",
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
        }

    def _shown(self, bucket: str, name: str) -> dict[str, Any]:
        stored = self.buckets[bucket][name]
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{stored.generation}",
            "bucket": bucket,
            "name": name,
            "generation": str(stored.generation),
            "metageneration": "1",
            "size": str(len(stored.data)),
            "contentType": "application/octet-stream",
            "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
            "etag": "CAE=",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "storageClass": "STANDARD",
            "mediaLink": f"{MEDIA}/b/{bucket}/o/{quote(name, safe='')}?alt=media",
        }

    @route("GET", "storage.googleapis.com", r"/storage/v1/b/([^/]+)")
    def _get_bucket(self, ask: Ask, name: str) -> Any:
        self._bucket(name)
        self.require(ask, "storage.buckets.get", f"buckets/{name}")
        return self._shown_bucket(name)

    @route("GET", "storage.googleapis.com", r"/storage/v1/b/([^/]+)/storageLayout")
    def _get_layout(self, ask: Ask, name: str) -> Any:
        self._bucket(name)
        self.require(ask, "storage.objects.list", f"buckets/{name}")
        return {"kind": "storage#storageLayout", "bucket": name, "location": self.region.upper()}

    @route("GET", "storage.googleapis.com", r"/storage/v1/b")
    def _list_buckets(self, ask: Ask) -> Any:
        self.require(ask, "storage.buckets.list", f"projects/{self.project}")
        return {"items": [self._shown_bucket(name) for name in self.buckets]}

    @route("POST", "storage.googleapis.com", r"/storage/v1/b")
    def _create_bucket(self, ask: Ask) -> Any:
        self.require(ask, "storage.buckets.create", f"projects/{self.project}")
        name = ask.document["name"]
        if name in self.buckets:
            raise Refusal(409, "Your previous request to create the named bucket succeeded.")
        self.buckets[name] = {}
        return self._shown_bucket(name)

    @route("PATCH", "storage.googleapis.com", r"/storage/v1/b/([^/]+)")
    def _update_bucket(self, ask: Ask, name: str) -> Any:
        self._bucket(name)
        self.require(ask, "storage.buckets.update", f"buckets/{name}")
        if ask.document.get("retentionPolicy"):
            self.retained.add(name)
        return self._shown_bucket(name)

    @route("GET", "storage.googleapis.com", r"/storage/v1/b/([^/]+)/iam")
    def _get_bucket_policy(self, ask: Ask, name: str) -> Any:
        self._bucket(name)
        self.require(ask, "storage.buckets.getIamPolicy", f"buckets/{name}")
        return self._policy(f"buckets/{name}")

    @route("PUT", "storage.googleapis.com", r"/storage/v1/b/([^/]+)/iam")
    def _set_bucket_policy(self, ask: Ask, name: str) -> Any:
        self._bucket(name)
        self.require(ask, "storage.buckets.setIamPolicy", f"buckets/{name}")
        return self._set_policy(f"buckets/{name}", ask.document)

    @route("GET", "storage.googleapis.com", r"/storage/v1/b/([^/]+)/o")
    def _list_objects(self, ask: Ask, bucket: str) -> Any:
        objects = self._bucket(bucket)
        self.require(ask, "storage.objects.list", f"buckets/{bucket}")
        prefix, delimiter = ask.query.get("prefix", ""), ask.query.get("delimiter", "")
        items, prefixes = [], set()
        for name in sorted(objects):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self._shown(bucket, name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    @route("GET", "storage.googleapis.com", r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
    def _get_object(self, ask: Ask, bucket: str, name: str) -> Any:
        objects = self._bucket(bucket)
        self.require(ask, "storage.objects.get", f"buckets/{bucket}")
        if name not in objects:
            raise Refusal(404, f"No such object: {bucket}/{name}")
        if ask.query.get("alt") != "media":
            return self._shown(bucket, name)
        return _media(objects[name], ask.headers.get("range", ""))

    @route("GET", "storage.googleapis.com", OF_THE_XML_API)
    def _read_object(self, ask: Ask, bucket: str, name: str) -> Any:
        """Reads through the XML API, as Terraform's client does."""
        return self._get_object(
            Ask(ask.account, ask.verb, ask.host, ask.path, {"alt": "media"}, b"", ask.headers),
            bucket,
            name,
        )

    @route("DELETE", "storage.googleapis.com", r"/storage/v1/b/([^/]+)/o/([^/]+)")
    def _delete_object(self, ask: Ask, bucket: str, name: str) -> Any:
        objects = self._bucket(bucket)
        self.require(ask, "storage.objects.delete", f"buckets/{bucket}")
        self._may_lose(bucket, name)
        if objects.pop(name, None) is None:
            raise Refusal(404, f"No such object: {bucket}/{name}")
        return Reply(b"", 204)

    @route("POST", "storage.googleapis.com", r"/(?:resumable/)?upload/storage/v1/b/([^/]+)/o")
    def _upload(self, ask: Ask, bucket: str) -> Any:
        self._bucket(bucket)
        name, data = _uploaded(ask)
        self._may_write(ask, bucket, name)
        if ask.query["uploadType"] == "resumable":
            session = f"s{len(self._uploads)}"
            self._uploads[session] = (bucket, name, b"")
            url = f"https://storage.googleapis.com/upload/storage/v1/b/{bucket}/o"
            return Reply(b"", 200, {"location": f"{url}?uploadType=resumable&upload_id={session}"})
        return self._store(bucket, name, data, ask.query.get("ifGenerationMatch"))

    @route("PUT", "storage.googleapis.com", r"/(?:resumable/)?upload/storage/v1/b/([^/]+)/o")
    def _upload_more(self, ask: Ask, _: str) -> Any:
        session = ask.query["upload_id"]
        bucket, name, data = self._uploads[session]
        data += ask.body
        end = re.fullmatch(
            r"bytes (?:\*|(\d+)-(\d+))/(\d+|\*)", ask.headers.get("content-range", "")
        )
        if end is not None and (end[3] == "*" or int(end[3]) > len(data)):
            self._uploads[session] = (bucket, name, data)
            return Reply(b"", 308, {"range": f"bytes=0-{len(data) - 1}"})
        return self._store(bucket, name, data, None)

    def _may_write(self, ask: Ask, bucket: str, name: str) -> None:
        self.require(ask, "storage.objects.create", f"buckets/{bucket}")
        if name in self.buckets[bucket]:
            self.require(ask, "storage.objects.delete", f"buckets/{bucket}")
            self._may_lose(bucket, name)

    def _may_lose(self, bucket: str, name: str) -> None:
        if bucket in self.retained:
            raise Refusal(403, f"Object '{bucket}/{name}' is subject to bucket's retention policy.")

    def _store(self, bucket: str, name: str, data: bytes, generation: str | None) -> Any:
        objects = self.buckets[bucket]
        present = objects[name].generation if name in objects else 0
        if generation is not None and int(generation) != present:
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
        self._generation += 1
        objects[name] = Stored(data, self._generation)
        return self._shown(bucket, name)


def _media(stored: Stored, wanted: str) -> Reply:
    checksum = base64.b64encode(crc32c(stored.data).to_bytes(4, "big")).decode()
    headers = {
        "content-type": "application/octet-stream",
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"crc32c={checksum}",
    }
    if found := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
        first = int(found[1])
        last = min(int(found[2] or len(stored.data) - 1), len(stored.data) - 1)
        headers["content-range"] = f"bytes {first}-{last}/{len(stored.data)}"
        return Reply(stored.data[first : last + 1], 206, headers)
    return Reply(stored.data, 200, headers)


def _uploaded(ask: Ask) -> tuple[str, bytes]:
    """An upload's name and content, sent in one of three formats."""
    kind = ask.query["uploadType"]
    if kind == "multipart":
        boundary = re.search(r"""boundary=["']?([^"';]+)""", ask.headers["content-type"])
        assert boundary is not None
        parts = ask.body.split(b"--" + boundary[1].encode())
        metadata, data = (
            part.partition(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n")[2]
            for part in parts[1:3]
        )
        name = ask.query.get("name") or json.loads(metadata).get("name")
        return name, data.removesuffix(b"\r\n") if data.endswith(b"\r\n") else data.removesuffix(
            b"\n"
        )
    if kind == "resumable":
        return ask.query.get("name") or ask.document["name"], b""
    return ask.query["name"], ask.body
