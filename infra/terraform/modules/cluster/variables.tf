variable "binary_authorization" {
  description = "If true, only images admitted by the project's policy may run."
  type        = bool
  default     = false
  nullable    = false
}

variable "compute_classes" {
  description = "If true, nodes come from ComputeClasses (for time-sharing, GKE 1.35.2-gke.1485000 or later) instead of node pools."
  type        = bool
  default     = false
  nullable    = false
}

variable "deletion_protection" {
  description = "If true, the cluster can't be deleted."
  type        = bool
  default     = true
  nullable    = false
}

variable "general_nodes" {
  description = "Nodes without a GPU."
  type = object({
    machine_type = optional(string, "e2-standard-4")
    max          = optional(number, 6)
    min          = optional(number, 1)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.general_nodes.min >= 1 && var.general_nodes.min <= var.general_nodes.max
    error_message = "general_nodes: min must be at least 1, for KEDA and the collectors, and at most max."
  }
}

variable "gpu_types" {
  description = "The catalog's GPU types (infra/kubernetes/gpus.yaml): accelerator, machine, boot disk, machines with more GPUs by number, on-demand availability, and the letters of the zones that have it, by region."
  type = map(object({
    accelerator  = string
    disk_gb      = number
    disk_type    = string
    larger       = optional(map(object({ disk_gb = number, machine_type = string })), {})
    machine_type = string
    on_demand    = optional(bool, true)
    zones        = map(list(string))
  }))
  nullable = false
}

variable "gpus" {
  description = "GPU type, share, count per worker, sharing (time-sharing or mps), and provisioning (standard or flex-start) of each node class, by name."
  type        = map(object({ type = string, share = number, count = optional(number, 1), sharing = optional(string, "time-sharing"), provisioning = optional(string, "standard") }))
  nullable    = false

  validation {
    condition     = alltrue([for gpu in var.gpus : gpu.share >= 1 && gpu.share <= 48])
    error_message = "gpu.share in models.yaml: must be from 1 to 48, GKE's maximum."
  }

  validation {
    condition = alltrue([for gpu in var.gpus : contains(keys(var.gpu_types), gpu.type)])
    error_message = "gpu.type in models.yaml: ${join(", ", [
      for gpu in var.gpus : gpu.type if !contains(keys(var.gpu_types), gpu.type)
    ])}: must be one of ${join(", ", keys(var.gpu_types))}."
  }

  validation {
    condition = alltrue([
      for gpu in var.gpus : var.spot || gpu.provisioning == "flex-start" || contains(keys(var.reservations), gpu.type) ||
      try(var.gpu_types[gpu.type].on_demand, true)
    ])
    error_message = "gpu.type in models.yaml: ${join(", ", [
      for gpu in var.gpus : gpu.type if !try(var.gpu_types[gpu.type].on_demand, true)
    ])} is not sold on demand, and nodes.spot is false."
  }

  validation {
    condition = alltrue([
      for gpu in var.gpus : anytrue([
        for letter in try(var.gpu_types[gpu.type].zones[var.region], []) :
        var.zones == null ? true : contains(var.zones, "${var.region}-${letter}")
      ]) if contains(keys(var.gpu_types), gpu.type)
    ])
    error_message = "regions.${var.region}: no zone has the GPUs that models.yaml requires; infra/kubernetes/gpus.yaml says which zones have ${join(", ", distinct([for gpu in var.gpus : gpu.type]))}${var.zones == null ? "" : ", and `zones` may exclude them"}."
  }
}

variable "hub_token" {
  description = "If true, Secret Manager's add-on mounts the Hugging Face Hub token into workers."
  type        = bool
  default     = false
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "max_gpus" {
  description = "Maximum number of nodes in each GPU pool. The quota must allow that many."
  type        = number
  default     = 8
  nullable    = false
}

variable "network" {
  description = "ID of the network."
  type        = string
  nullable    = false
}

variable "overflow" {
  description = "GPU type to use when another is out of stock; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.overflow == null ? true : contains(keys(var.gpu_types), var.overflow)
    error_message = "overflow: ${coalesce(var.overflow, "null")}: must be one of ${join(", ", keys(var.gpu_types))}."
  }

  validation {
    condition     = try(var.gpu_types[var.overflow].on_demand, true)
    error_message = "overflow: ${coalesce(var.overflow, "null")} is not sold on demand."
  }

  validation {
    condition = var.overflow == null ? true : anytrue([
      for letter in try(var.gpu_types[var.overflow].zones[var.region], []) :
      var.zones == null ? true : contains(var.zones, "${var.region}-${letter}")
    ])
    error_message = "regions.${var.region}: no zone has ${coalesce(var.overflow, "null")} (infra/kubernetes/gpus.yaml), or `zones` excludes those that do. Set regions.${var.region}.overflow to another type, or to \"none\"."
  }
}

variable "pods_range" {
  description = "Secondary address range for pods."
  type        = string
  nullable    = false
}

variable "prefix" {
  description = "First part of every resource name."
  type        = string
  nullable    = false
}

variable "preloaded_images" {
  description = "Disk image attached to every GPU node. `containers` contains the worker image."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.preloaded_images), ["containers"])) == 0
    error_message = "nodes.preloaded_images: ${join(", ", setsubtract(keys(var.preloaded_images), ["containers"]))}: only `containers`, the worker's image, is supported. Disks with weights are not mounted; copy the weights with `penstock weights prefetch` and set weights.prefetched."
  }
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "region" {
  description = "Region of the cluster."
  type        = string
  nullable    = false
}

variable "registry" {
  description = "Repository that the nodes pull from."
  type        = object({ id = string, location = string })
  nullable    = false
}

variable "min_version" {
  description = "Minimum version of the control plane. GKE upgrades it according to the channel."
  type        = string
  default     = "1.35.0-gke.1171000"
  nullable    = false
}

variable "release_channel" {
  description = "GKE's release channel."
  type        = string
  default     = "REGULAR"
  nullable    = false

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE", "EXTENDED"], var.release_channel)
    error_message = "release_channel: must be RAPID, REGULAR, STABLE or EXTENDED."
  }
}

variable "reservations" {
  description = "Reservation for each GPU type that has one: name, zone, and, if shared, its project. Reservations are used first."
  type        = map(object({ name = string, zone = string, project = optional(string) }))
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for type in keys(var.reservations) : contains(keys(var.gpu_types), type)])
    error_message = "regions.${var.region}.reservations: ${join(", ", setsubtract(keys(var.reservations), keys(var.gpu_types)))}: must be one of ${join(", ", keys(var.gpu_types))}."
  }

  validation {
    condition = alltrue([
      for type, reservation in var.reservations : contains([
        for letter in try(var.gpu_types[type].zones[var.region], []) : "${var.region}-${letter}"
      ], reservation.zone) if contains(keys(var.gpu_types), type)
    ])
    error_message = "regions.${var.region}.reservations: ${join(", ", [for type, reservation in var.reservations : "${reservation.zone} for ${type}"])}: not a zone of ${var.region} that has the GPU (infra/kubernetes/gpus.yaml)."
  }
}

variable "services_range" {
  description = "Secondary address range for services."
  type        = string
  nullable    = false
}

variable "spot" {
  description = "If true, every GPU class has a pool of spot nodes in addition to its on-demand pool."
  type        = bool
  default     = true
  nullable    = false
}

variable "subnetwork" {
  description = "ID of the nodes' subnetwork."
  type        = string
  nullable    = false
}

variable "zones" {
  description = "Zones for the nodes. GPU nodes use only the zones that have the GPU; null: all of the region's zones that have it."
  type        = list(string)
  default     = null
}
