"""A worker's placement and its share of the node: a whole GPU, part of one, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infra.kubernetes.deployment import Deployment, GpuType, Machine, gpu_class, zones_with
from infra.kubernetes.kustomization import dump_yaml
from shared.errors import ConfigurationError
from shared.models.catalog import Model, WorkerGroup
from shared.models.entry import Gpu

SHARED_MEMORY = 0.92
"""Share of GPU memory for torch. Each process also has a CUDA context."""
PAUSE_S = 2
"""preStop in the base, in seconds."""
DRAIN_S = 60
KILL_MARGIN_S = 10
"""Time from the end of the drain to SIGKILL, for writing rows to disk and closing connections."""
SPOT_SHUTDOWN_S = 30
"""Time from the notice until a spot node shuts down. This is GKE's default.

GKE also allows 120 s (not tested).
"""
SPOT_SYSTEM_S = 5
"""The final part of the shutdown time, which is reserved for system pods.

GKE's default is 15 s, which would leave only 15 s for workers.
"""
SPOT_DRAIN_S = 15
SPOT_MARGIN_S = SPOT_SHUTDOWN_S - SPOT_SYSTEM_S - PAUSE_S - SPOT_DRAIN_S
SPOT_KUBELET = {
    "shutdownGracePeriodSeconds": SPOT_SHUTDOWN_S,
    "shutdownGracePeriodCriticalPodsSeconds": SPOT_SYSTEM_S,
}
PLUGIN_CONFIG = "nvidia.com/device-plugin.config"
"""Node label that names the configuration of NVIDIA's device plugin on that node.

See https://github.com/NVIDIA/k8s-device-plugin#updating-per-node-configuration-with-a-node-label
"""
TIME_SLICING = "penstock-time-slicing"
CPU_ONLY = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "10240Mi"}

GIB = 2**30


@dataclass(frozen=True)
class Placement:
    """One worker's placement. `components` are folders below infra/kubernetes/components."""

    components: tuple[str, ...]
    node_selector: dict[str, str]
    accelerators: tuple[str, ...]
    resources: dict[str, dict[str, str]]
    settings: dict[str, str]
    grace_s: int

    @property
    def processes(self) -> int:
        """Number of model processes in the worker, which run concurrently."""
        return int(self.settings["PENSTOCK_PROCESSES"])

    @property
    def cache_gib(self) -> int | None:
        """The part of the node's disk for downloads. None means the same as in the base."""
        limit = self.resources["limits"].get("ephemeral-storage")
        return None if limit is None else int(limit.removesuffix("Gi")) * 3 // 4

    @property
    def disk_mib(self) -> int:
        """The worker's part of the node's disk."""
        storage = self.resources["requests"]["ephemeral-storage"]
        return int(storage.removesuffix("Mi"))


def processes_of(models: Sequence[Model]) -> int:
    """Returns the number of model processes in a worker that serves these models.

    This is the number in the catalog entry, if set. Otherwise, it is one per GPU, or one per core
    on a CPU, or a single process if weights are shared. All processes run concurrently.
    """
    if wanted := [model.processes for model in models if model.processes]:
        return min(wanted)
    has_one = models[0].gpu.type != "none" or any(
        model.definition.shares_weights for model in models
    )
    return 1 if has_one else int(CPU_ONLY["cpu"])


def place(group: WorkerGroup, deployment: Deployment, gpu_types: dict[str, GpuType]) -> Placement:
    """Returns the placement of workers for one or several models.

    Raises:
        ConfigurationError: the GPU's memory is too small for all models.
    """
    check_gpu_memory(group, gpu_types)
    gpu = group.gpu
    may_be_spot = deployment.spot and gpu.type != "none" and is_standard(gpu)
    drain_s, margin_s = (SPOT_DRAIN_S, SPOT_MARGIN_S) if may_be_spot else (DRAIN_S, KILL_MARGIN_S)
    settings = {
        "PENSTOCK_DRAIN_S": str(drain_s),
        "PENSTOCK_MEMORY_FRACTION": f"{memory_fraction(gpu):g}",
    }
    grace_s = PAUSE_S + drain_s + margin_s
    processes = processes_of(group.models)
    if gpu.type == "none":
        # A container sees all of the node's cores, so its share is set explicitly.
        settings |= {
            "PENSTOCK_DEVICE": "cpu",
            "PENSTOCK_PROCESSES": str(processes),
            "PENSTOCK_THREADS": str(max(1, int(CPU_ONLY["cpu"]) // processes)),
        }
        return Placement((), {}, (), _resources(CPU_ONLY), settings, grace_s)
    settings |= {"PENSTOCK_DEVICE": "cuda", "PENSTOCK_PROCESSES": str(processes)}
    if not may_be_spot and not deployment.is_outside:
        settings["PENSTOCK_SPOT"] = "false"  # otherwise, the pod has no way to find out
    node = gpu_types[gpu.type].machine(gpu.count)
    resources = _resources(share_of(gpu, gpu_types), node=node, gpus=gpu.count)
    if deployment.is_outside:
        chosen = {PLUGIN_CONFIG: shared_by(gpu)} if deployment.time_slicing else {}
        return Placement(("gpu-outside",), chosen, (), resources, settings, grace_s)
    packed: tuple[str, ...] = ("packed",) if gpu.share > 1 else ()
    if gpu.sharing == "mps":
        packed += ("mps",)
    if deployment.compute_classes:
        chosen = {"cloud.google.com/compute-class": f"workers-{gpu_class(gpu)}"}
        return Placement(("compute-class", *packed), chosen, (), resources, settings, grace_s)
    chosen = {"penstock.dev/gpu": gpu_class(gpu)}
    if gpu.share > 1:
        chosen["cloud.google.com/gke-gpu-sharing-strategy"] = gpu.sharing
        chosen["cloud.google.com/gke-max-shared-clients-per-gpu"] = str(gpu.share)
    overflow = deployment.overflow if can_overflow(gpu) else None
    types = dict.fromkeys(type_ for type_ in (gpu.type, overflow) if type_)
    accelerators = tuple(gpu_types[type_].accelerator for type_ in types)
    return Placement(("gpu", *packed), chosen, accelerators, resources, settings, grace_s)


def shared_by(gpu: Gpu) -> str:
    return f"shared-by-{gpu.share}" + ("-mps" if gpu.sharing == "mps" else "")


def time_slicing(models: Iterable[Model]) -> dict[str, Any]:
    """Returns a ConfigMap of NVIDIA device plugin configurations, one per way to share a GPU.

    Has no namespace, because the plugin's namespace is not ours.
    """
    gpus = {model.gpu for model in models if model.gpu.type != "none"}
    data = {}
    for gpu in sorted(gpus, key=lambda gpu: (gpu.share, gpu.sharing)):
        config: dict[str, Any] = {"version": "v1", "flags": {"migStrategy": "none"}}
        if gpu.share > 1:
            resources = [{"name": "nvidia.com/gpu", "replicas": gpu.share}]
            sharing = {"renameByDefault": False, "resources": resources}
            config["sharing"] = (
                {"mps": sharing}
                if gpu.sharing == "mps"
                else {"timeSlicing": {"failRequestsGreaterThanOne": True} | sharing}
            )
        data[shared_by(gpu)] = dump_yaml(config)
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": TIME_SLICING}}
    return head | {"data": data}


def memory_fraction(gpu: Gpu) -> float:
    """Returns the fraction of a GPU's memory that torch may use in one worker.

    Time-sharing does not partition memory. MPS does, and the limit here is slightly smaller.
    """
    return 1.0 if gpu.share == 1 else int(SHARED_MEMORY / gpu.share * 1000) / 1000


def gpu_memory_bytes(gpu: Gpu, gpu_types: dict[str, GpuType]) -> int:
    """Returns how much GPU memory one worker's models may use, not counting CUDA contexts."""
    part = min(SHARED_MEMORY, memory_fraction(gpu))
    return int(gpu_types[gpu.type].gpu_memory_gib * GIB * gpu.count * part)


def check_gpu_memory(group: WorkerGroup, gpu_types: dict[str, GpuType]) -> None:
    """Checks that all models that share a worker fit in its GPU's memory at the same time.

    Raises:
        ConfigurationError: they don't fit, or a model's memory requirement is not specified.
    """
    if not group.is_shared or group.gpu.type == "none":
        return
    for model in group.models:
        if model.resources.gpu_memory_bytes is None:
            field = f"{model.name}.resources.gpu_memory_bytes"
            raise ConfigurationError(
                f"{field}: is required; set it to the GPU memory used by its weights and its "
                f"largest batch, because workers {group.name!r} load all their models at the "
                "same time",
                field=field,
            )
    needs_bytes = {model.name: model.resources.gpu_memory_bytes or 0 for model in group.models}
    has = gpu_memory_bytes(group.gpu, gpu_types)
    if sum(needs_bytes.values()) > has:
        each = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needs_bytes.items())
        raise ConfigurationError(
            f"workers.{group.name}: its models need {sum(needs_bytes.values()) / GIB:.2f} GiB of "
            f"GPU memory ({each}), but a worker has {has / GIB:.2f} GiB of a {group.gpu.type} "
            f"(gpu.share: {group.gpu.share}); use fewer models, a smaller gpu.share or a larger "
            "gpu.type",
            field=f"workers.{group.name}",
        )


def share_of(gpu: Gpu, gpu_types: dict[str, GpuType]) -> dict[str, str]:
    """Returns one worker's CPU, memory, and disk on its node, which it may share."""
    node = gpu_types[gpu.type].machine(gpu.count)
    return {
        "cpu": f"{node.cpu * 1000 // gpu.share}m",
        "memory": f"{node.memory_gib * 1024 // gpu.share}Mi",
        "ephemeral-storage": f"{node.ephemeral_gib * 1024 // gpu.share}Mi",
    }


def memory_mib(gpu: Gpu, gpu_types: dict[str, GpuType]) -> int:
    return _mib((CPU_ONLY if gpu.type == "none" else share_of(gpu, gpu_types))["memory"])


def leave_room(
    resources: dict[str, dict[str, str]], cpu_m: int, memory_mib: int
) -> dict[str, dict[str, str]]:
    """Subtracts a sidecar's requests from the worker's, so that just as many pods fit on a node."""
    requests = resources["requests"]
    cpu = f"{_milli(requests['cpu']) - cpu_m}m"
    memory = f"{_mib(requests['memory']) - memory_mib}Mi"
    return {
        "requests": requests | {"cpu": cpu, "memory": memory},
        "limits": resources["limits"] | {"memory": memory},
    }


def _milli(cpu: str) -> int:
    return int(cpu[:-1]) if cpu.endswith("m") else int(cpu) * 1000


def _mib(memory: str) -> int:
    return int(memory[:-2]) * (1024 if memory.endswith("Gi") else 1)


def _resources(
    share: dict[str, str], *, node: Machine | None = None, gpus: int = 1
) -> dict[str, dict[str, str]]:
    # CPU is not limited, and disk is limited only by the node, so workers can use resources that
    # their neighbors leave idle. On a shared node, the GPU is requested once.
    if node is None:
        return {"requests": share, "limits": {"memory": share["memory"]}}
    wanted = {"nvidia.com/gpu": str(gpus)}
    disk = {"ephemeral-storage": f"{node.ephemeral_gib}Gi"}
    return {"requests": share | wanted, "limits": {"memory": share["memory"]} | disk | wanted}


def compute_class(
    gpu: Gpu, deployment: Deployment, gpu_types: dict[str, GpuType]
) -> dict[str, Any]:
    """Returns a ComputeClass: reserved, spot, on demand, then the larger GPU; or flex-start."""
    # The CRD's terms differ from the node label's (`time-sharing`).
    strategy = "MPS" if gpu.sharing == "mps" else "TIME_SHARING"
    sharing = {"gpuSharing": {"sharingStrategy": strategy, "maxSharedClientsPerGPU": gpu.share}}
    # As in infra/terraform/modules/cluster/nodes.tf: CUDA 13 needs driver R580 or later.
    driver = {"count": gpu.count, "driverVersion": "latest"}

    def rule(type_: str, **how: Any) -> dict[str, Any]:
        node, machine = gpu_types[type_], gpu_types[type_].machine(gpu.count)
        zones = zones_with(type_, deployment.region, gpu_types, deployment.zones)
        return {
            "machineType": machine.machine_type,
            "gpu": {"type": node.accelerator} | driver | (sharing if gpu.share > 1 else {}),
            "location": {"zones": list(zones)},
            "storage": {"bootDiskSize": machine.disk_gb, "bootDiskType": node.disk_type},
        } | how

    on_demand = {"spot": False}
    if not is_standard(gpu):
        rules = [rule(gpu.type, flexStart={"enabled": True})]
    else:
        rules = [rule(gpu.type, **how) for how in _reservation_fields(gpu, deployment)]
        if deployment.spot:
            kubelet = {"nodeSystemConfig": {"kubeletConfig": SPOT_KUBELET}}
            rules.append(rule(gpu.type, spot=True, **kubelet))
        if gpu_types[gpu.type].on_demand:
            rules.append(rule(gpu.type, **on_demand))
        if can_overflow(gpu) and deployment.overflow not in (None, gpu.type):
            rules.append(rule(str(deployment.overflow), **on_demand))
    return {
        "apiVersion": "cloud.google.com/v1",
        "kind": "ComputeClass",
        "metadata": {"name": "workers"},
        "spec": {"priorities": rules},
    }


def is_standard(gpu: Gpu) -> bool:
    return gpu.provisioning == "standard"


def can_overflow(gpu: Gpu) -> bool:
    """Returns whether workers may run on a larger GPU while their type is out of stock.

    Workers with several GPUs can't, because the larger type may not have a machine with as many.
    """
    return is_standard(gpu) and gpu.count == 1


def _reservation_fields(gpu: Gpu, deployment: Deployment) -> Iterator[dict[str, Any]]:
    """Returns the extra fields of a reservation's rule, if this type has a reservation."""
    reservation = None if gpu.type == "none" else deployment.reservations.get(gpu.type)
    if reservation is None:
        return
    named = {"name": reservation.name} | (
        {"project": reservation.project} if reservation.project else {}
    )
    yield {
        "reservations": {"affinity": "Specific", "specific": [named]},
        "location": {"zones": [reservation.zone]},
    }
