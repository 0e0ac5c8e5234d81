"""The contenders: peers as documented, two manually tuned ones, and three variants of Penstock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.peers.answers import PLACE
from bench.pipeline import MODEL

Broker = Literal["pubsub", "rabbitmq"]
Group = Literal["peer", "tuned", "ours"]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "BENTOML_DO_NOT_TRACK": "True",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment for all peers: nothing is downloaded or sent while they are measured."""
TEXT = {"text": PLACE}


@dataclass(frozen=True)
class Contender:
    """One way to serve the model.

    Args:
        key: name on the command line and in the results.
        name: name shown in the tables.
        group: `peer` as documented, `tuned` manually, or `ours`.
        body: a request's JSON body, with PLACE where the text goes.
        answer: keys and indices that lead to the vector in its response.
        commands: the programs, started in this order. `{port}` is the port to listen on, `{spare}`
            and `{spare2}` are other free ports, `{bin}` is the folder of the environment's
            programs, `{home}` is the peer's folder, and `{model}` is the model's folder.
        environment: variables to add to this process's environment. The same placeholders are
            replaced in them.
        entry: fields of Penstock's catalog entry for the model that differ from those in the
            shipped entry.
        broker: `rabbitmq` uses a RabbitMQ server on this machine. A peer's commands and environment
            get its port as `{broker}`.
    """

    key: str
    name: str
    group: Group
    note: str
    path: str
    body: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    answer: tuple[str | int, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    entry: Mapping[str, Any] = field(default_factory=dict)
    broker: Broker = "pubsub"

    @property
    def folder(self) -> str:
        """The peer's folder next to this file, with its server and requirements."""
        return "" if self.group == "ours" else self.key.partition("-")[0]


HOST_AND_PORT = ("--host", "127.0.0.1", "--port", "{port}")
UVICORN = (
    *("{bin}/uvicorn", "--app-dir", "{home}", *HOST_AND_PORT),
    *("--log-level", "warning", "--no-access-log"),
)
MOSEC_OPTIONS = (
    *("--address", "127.0.0.1", "--port", "{port}"),
    *("--timeout", "300000", "--log-level", "warning"),
)
"""Mosec's default timeout is 3 s. With that timeout, Mosec returns 408 at 128 or more requests in
flight.
"""
TUNED = ("{bin}/python", "{home}/tuned.py", *MOSEC_OPTIONS)
TUNED_NOTE = "two workers of one thread, batches of 32 sorted by length and run by 4, torch"
INFINITY = (
    *("{bin}/infinity_emb", "v2", "--model-id", "{model}", "--served-model-name", "minilm"),
    *("--engine", "torch", "--device", "cpu", "--dtype", "float32", "--batch-size", "32"),
)
CELERY = (
    ("{bin}/redis-server", "--port", "{spare}", "--bind", "127.0.0.1", "--save", ""),
    ("{bin}/celery", "--workdir", "{home}", "-A", "tasks", "worker", "--loglevel", "WARNING"),
    (*UVICORN, "front:app"),
)
CELERY_RESULTS = {"PEER_REDIS_URL": "redis://127.0.0.1:{spare}/0"}

PEERS = (
    Contender(
        "fastapi",
        "FastAPI, `def`",
        "peer",
        "sentence-transformers in a `def` endpoint (threads), uvicorn, no batching",
        "/embed",
        commands=((*UVICORN, "server:app"),),
    ),
    Contender(
        "fastapi-async",
        "FastAPI, `async`",
        "peer",
        "the same in an `async` endpoint",
        "/embed-async",
        commands=((*UVICORN, "server:app"),),
    ),
    Contender(
        "litserve",
        "LitServe",
        "peer",
        "dynamic batching, 32 or 10 ms",
        "/predict",
        answer=("embedding",),
        commands=(("{bin}/python", "{home}/server.py", "{port}"),),
    ),
    Contender(
        "mosec",
        "Mosec",
        "peer",
        "dynamic batching, 32 or 10 ms, one worker",
        "/inference",
        commands=(("{bin}/python", "{home}/server.py", *MOSEC_OPTIONS),),
    ),
    Contender(
        "infinity",
        "Infinity",
        "peer",
        "its own server and batching, torch engine, batch 32",
        "/embeddings",
        body={"model": "minilm", "input": PLACE},
        answer=("data", 0, "embedding"),
        commands=((*INFINITY, *HOST_AND_PORT, "--log-level", "warning", "--no-bettertransformer"),),
    ),
    Contender(
        "bentoml",
        "BentoML",
        "peer",
        "adaptive batching, at most 32",
        "/encode",
        body={"sentences": [PLACE]},
        answer=(0,),
        commands=(
            (
                *("{bin}/bentoml", "serve", "--working-dir", "{home}"),
                *("service:BentoEmbedding", *HOST_AND_PORT),
            ),
        ),
    ),
    Contender(
        "ray",
        "Ray Serve",
        "peer",
        "`@serve.batch`, 32 or 10 ms, one replica",
        "/",
        commands=(("{bin}/python", "{home}/server.py", "{port}"),),
    ),
    Contender(
        "celery",
        "Celery + Redis",
        "peer",
        "FastAPI in front, prefork worker with a process per core, no batching",
        "/embed",
        commands=CELERY,
        environment=CELERY_RESULTS,
    ),
    Contender(
        "celery-rabbitmq",
        "Celery + RabbitMQ",
        "peer",
        "the same with RabbitMQ as the broker, and Redis for results",
        "/embed",
        commands=CELERY,
        environment={
            **CELERY_RESULTS,
            "PEER_BROKER_URL": "amqp://guest:guest@127.0.0.1:{broker}//",
        },
        broker="rabbitmq",
    ),
    Contender(
        "mlserver",
        "MLServer",
        "peer",
        "custom runtime, adaptive batching, 32 or 10 ms, one worker",
        "/v2/models/minilm/infer",
        body={"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [PLACE]}]},
        answer=("outputs", 0, "data"),
        commands=(("{bin}/mlserver", "start", "{home}"),),
        environment={
            "MLSERVER_HOST": "127.0.0.1",
            "MLSERVER_HTTP_PORT": "{port}",
            "MLSERVER_GRPC_PORT": "{spare}",
            "MLSERVER_METRICS_PORT": "{spare2}",
            "MLSERVER_METRICS_DIR": "/tmp",
            "MLSERVER_PARALLEL_WORKERS": "1",
            "MLSERVER_DEBUG": "false",
            "MLSERVER_MODEL_NAME": "minilm",
            "MLSERVER_MODEL_IMPLEMENTATION": "runtime.MlserverEmbedding",
            "MLSERVER_MODEL_MAX_BATCH_SIZE": "32",
            "MLSERVER_MODEL_MAX_BATCH_TIME": "0.01",
        },
    ),
    Contender(
        "mosec-fp32",
        "Mosec tuned, fp32",
        "tuned",
        f"{TUNED_NOTE} fp32",
        "/inference",
        commands=(TUNED,),
        environment={"MINILM_DTYPE": "float32"},
    ),
    Contender(
        "mosec-bf16",
        "Mosec tuned, bf16",
        "tuned",
        f"{TUNED_NOTE} bf16",
        "/inference",
        commands=(TUNED,),
        environment={"MINILM_DTYPE": "bfloat16"},
    ),
)


def penstock(key: str, name: str, note: str, broker: Broker = "pubsub", **entry: Any) -> Contender:
    """Returns Penstock with `entry` applied to the catalog.

    It responds with JSON lists of floats, as the peers do.
    """
    body = {"model": MODEL, "input": PLACE, "encoding_format": "float"}
    return Contender(
        *(key, name, "ours", note, "/v1/embeddings", body, ("data", 0, "embedding")),
        entry=entry,
        broker=broker,
    )


OURS = (
    penstock(
        "penstock", "Penstock", "as `make up` serves it, image model and BigQuery rows included"
    ),
    penstock(
        "penstock-fp32",
        "Penstock, torch fp32",
        "the same, torch fp32 only",
        backend="torch",
        precision="fp32",
    ),
    penstock(
        "penstock-int8",
        "Penstock, int8",
        "the same, ONNX Runtime int8, cosine at least 0.99",
        backend="onnx",
        precision="int8",
        tolerance={"cosine": 0.99},
    ),
    penstock(
        "penstock-rabbitmq",
        "Penstock on RabbitMQ",
        "as `make up BROKER=rabbitmq` serves it",
        broker="rabbitmq",
    ),
)
CONTENDERS = (*PEERS, *OURS)
