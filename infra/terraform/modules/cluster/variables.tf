variable "binary_authorization" {
  description = "Whether only images that the project's policy admits may run."
  type        = bool
  default     = false
  nullable    = false
}

variable "compute_classes" {
  description = "Whether nodes come from ComputeClasses (GKE 1.35.2-gke.1485000 or later, for time-sharing) instead of node pools."
  type        = bool
  default     = false
  nullable    = false
}

variable "deletion_protection" {
  description = "Whether the cluster refuses to be deleted."
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
    error_message = "At least one node, for KEDA and the collectors."
  }
}

variable "gpu_types" {
  description = "Accelerator and machine type of each GPU type of the catalog (infra/kubernetes/gpus.yaml)."
  type        = map(object({ accelerator = string, machine_type = string }))
  nullable    = false
}

variable "gpus" {
  description = "GPU type and share of each class of nodes, by the class's name."
  type        = map(object({ type = string, share = number }))
  nullable    = false

  validation {
    condition     = alltrue([for gpu in var.gpus : gpu.share >= 1 && gpu.share <= 48])
    error_message = "GKE shares a GPU among 48 at most."
  }
}

variable "labels" {
  description = "Labels of every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "max_gpus" {
  description = "Most nodes of each GPU pool; the quota must hold as many."
  type        = number
  default     = 8
  nullable    = false
}

variable "network" {
  description = "Id of the network."
  type        = string
  nullable    = false
}

variable "overflow" {
  description = "GPU type that takes over where another is out of stock; null: none."
  type        = string
  default     = null
}

variable "pods_range" {
  description = "Secondary range of the pods."
  type        = string
  nullable    = false
}

variable "prefix" {
  description = "First part of every name."
  type        = string
  nullable    = false
}

variable "preloaded_images" {
  description = "Disk images attached to every GPU node: `containers` holds the worker image, any other weights."
  type        = map(string)
  default     = {}
  nullable    = false
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

variable "release_channel" {
  description = "GKE's release channel."
  type        = string
  default     = "REGULAR"
  nullable    = false

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE", "EXTENDED"], var.release_channel)
    error_message = "Channels are RAPID, REGULAR, STABLE and EXTENDED."
  }
}

variable "services_range" {
  description = "Secondary range of the services."
  type        = string
  nullable    = false
}

variable "spot" {
  description = "Whether every GPU class gets a pool of spot nodes beside the one on demand."
  type        = bool
  default     = true
  nullable    = false
}

variable "subnetwork" {
  description = "Id of the nodes' subnetwork."
  type        = string
  nullable    = false
}

variable "zones" {
  description = "Zones that have the GPUs; null: GKE picks."
  type        = list(string)
  default     = null
}
