variable "cluster" {
  description = "Name of the region's cluster, from the platform stage's `clusters` output."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", var.cluster))
    error_message = "cluster: must have at most 40 lowercase letters, digits or hyphens, start with a letter and not end in a hyphen."
  }
}

variable "keda" {
  description = "Version of KEDA's chart, and number of KEDA operator replicas (one is active, the others stand by)."
  type = object({
    replicas = optional(number, 2)
    version  = optional(string, "2.20.2")
  })
  default  = {}
  nullable = false

  # 2.17 brought the fallback's behavior, 2.18.3 the fix of CVE-2025-68476, 2.19 the fallback of a model at zero, and
  # 2.20.2 the fixes of races and leaks in the fallback.
  validation {
    condition     = can(regex("^2[.](20[.]([2-9]|[1-9][0-9])|(2[1-9]|[3-9][0-9])[.][0-9]+)$", var.keda.version))
    error_message = "keda.version: must be a version of KEDA 2, at least 2.20.2."
  }

  validation {
    condition     = var.keda.replicas >= 1 && floor(var.keda.replicas) == var.keda.replicas
    error_message = "keda.replicas: must be a whole number, at least 1."
  }
}

variable "models_file" {
  description = "The catalog that the objects were rendered from; null: models.yaml in the root of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.models_file == null ? true : fileexists(var.models_file)
    error_message = "models_file: the file does not exist."
  }
}

variable "objects_file" {
  description = "File with the objects that `kubectl kustomize` rendered from the region's overlay."
  type        = string
  nullable    = false

  validation {
    condition     = fileexists(var.objects_file)
    error_message = "objects_file: the file does not exist. Write the overlay (python -m infra.kubernetes) and render it (kubectl kustomize)."
  }
}

variable "project_id" {
  description = "Project of the cluster."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id: must have 6 to 30 lowercase letters, digits or hyphens."
  }
}

variable "region" {
  description = "Region of the cluster."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region: must be a region, such as europe-west4."
  }
}

variable "wait_for_workers" {
  description = "If true, an apply waits until every worker is warm."
  type        = bool
  default     = false
  nullable    = false
}
