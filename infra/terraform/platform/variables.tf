variable "alerts" {
  description = "Who is told, and from when on: share of 5xx, and age of the oldest job."
  type = object({
    emails       = optional(list(string), [])
    error_ratio  = optional(number, 0.02)
    oldest_job_s = optional(number, 60)
  })
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for email in var.alerts.emails : can(regex("^[^@ ]+@[^@ ]+$", email))])
    error_message = "Each of alerts.emails is an address."
  }

  validation {
    condition     = var.alerts.error_ratio > 0 && var.alerts.error_ratio < 1
    error_message = "alerts.error_ratio lies between 0 and 1."
  }
}

variable "api" {
  description = "The API on Cloud Run. Without an image there is none yet: the first apply makes the registry that it is pushed to."
  type = object({
    concurrency   = optional(number, 80)
    cpu           = optional(number, 2)
    image         = optional(string)
    max_in_flight = optional(number, 1024)
    max_instances = optional(number, 4)
    memory        = optional(string, "1Gi")
    min_instances = optional(number, 1)
    timeout_s     = optional(number, 360)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.api.min_instances >= 1 && var.api.min_instances <= var.api.max_instances
    error_message = "At least one instance, and no more than max_instances."
  }
}

variable "armor" {
  description = "Requests a minute from one address: above the first they are refused, above the second it is banned for a minute."
  type = object({
    ban_above_per_min = optional(number, 12000)
    requests_per_min  = optional(number, 6000)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.armor.requests_per_min > 0 && var.armor.requests_per_min <= var.armor.ban_above_per_min
    error_message = "A ban comes after refusals, not before."
  }
}

variable "budget" {
  description = "Monthly budget of the project, in units of the currency; null: none. The caller needs rights on the billing account."
  type = object({
    billing_account = string
    currency        = optional(string, "USD")
    units_per_month = number
  })
  default = null

  validation {
    condition     = var.budget == null ? true : var.budget.units_per_month > 0
    error_message = "A budget is more than nothing."
  }
}

variable "cache" {
  description = "Memorystore for Valkey in each region: size, version and copies."
  type = object({
    engine_version = optional(string, "VALKEY_8_0")
    node_type      = optional(string, "STANDARD_SMALL")
    replicas       = optional(number, 1)
  })
  default  = {}
  nullable = false
}

variable "dataset" {
  description = "BigQuery dataset of the rows."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_]+$", var.dataset))
    error_message = "A dataset id has letters, digits and underscores."
  }
}

variable "dataset_location" {
  description = "Location of the dataset: a region, EU or US."
  type        = string
  default     = "EU"
  nullable    = false
}

variable "deletion_protection" {
  description = "Whether services, caches, clusters and the table refuse to be deleted, and buckets and dataset to be emptied."
  type        = bool
  default     = true
  nullable    = false
}

variable "delivery" {
  description = "The workers' subscriptions: lease, retention and redelivery."
  type = object({
    ack_deadline_s        = optional(number, 10)
    max_delivery_attempts = optional(number, 5)
    retention_s           = optional(number, 3600)
    retry_max_s           = optional(number, 10)
    retry_min_s           = optional(number, 0.1)
  })
  default  = {}
  nullable = false
}

variable "domain" {
  description = "Domain of the API; its A record has to point to the output `address`. Null: no load balancer, each region answers on its run.app address."
  type        = string
  default     = null

  validation {
    condition     = var.domain == null ? true : can(regex("^([a-z0-9]([a-z0-9-]*[a-z0-9])?[.])+[a-z]{2,}$", var.domain))
    error_message = "A domain looks like api.example.com."
  }
}

variable "functions" {
  description = "Images of the functions behind Pub/Sub push; each exists as soon as it has one."
  type = object({
    dead_letters = optional(object({ image = string }))
    webhooks     = optional(object({ image = string }))
  })
  default  = {}
  nullable = false
}

variable "inboxes" {
  description = "The pool of reply inboxes: how many for each region, and slots of each. Twice the API's instances, so that a new revision can start beside the old one."
  type = object({
    per_region = optional(number, 8)
    slots      = optional(number, 80)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.inboxes.per_region >= 2 * var.api.max_instances
    error_message = "Inboxes are leased one per API instance, by old and new revision: per_region is at least twice api.max_instances."
  }

  # Pub/Sub allows a project 10,000 subscriptions; the models need three each.
  validation {
    condition     = var.inboxes.per_region * var.inboxes.slots * length(var.regions) <= 9000
    error_message = "Regions x inboxes x slots is 9000 at most; fewer slots do as well, requests then share them."
  }
}

variable "keep_messages_in_regions" {
  description = "Whether Pub/Sub may store messages in the regions of `regions` only."
  type        = bool
  default     = false
  nullable    = false
}

variable "labels" {
  description = "Labels of every resource that takes them."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "models_file" {
  description = "The catalogue; null: models.yaml at the top of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.models_file == null ? true : fileexists(var.models_file)
    error_message = "There is no such file."
  }
}

variable "namespace" {
  description = "Kubernetes namespace of the workers; their rights name it."
  type        = string
  default     = "penstock"
  nullable    = false
}

variable "network_cidr" {
  description = "Addresses of all regions, a /10; each region takes a sixteenth."
  type        = string
  default     = "10.64.0.0/10"
  nullable    = false

  validation {
    condition     = can(cidrhost(var.network_cidr, 0)) && tonumber(split("/", var.network_cidr)[1]) <= 10
    error_message = "Give a block of at least a /10."
  }
}

variable "nodes" {
  description = "Nodes of the clusters. `compute_classes` takes nodes from ComputeClasses instead of node pools; `overflow` is the GPU type that takes over where another is out of stock."
  type = object({
    binary_authorization = optional(bool, false)
    compute_classes      = optional(bool, false)
    general              = optional(object({ machine_type = optional(string), max = optional(number), min = optional(number) }), {})
    max_gpus             = optional(number, 8)
    overflow             = optional(string)
    preloaded_images     = optional(map(string), {})
    release_channel      = optional(string, "REGULAR")
    spot                 = optional(bool, true)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.nodes.overflow == null ? true : contains(["a100", "l4"], var.nodes.overflow)
    error_message = "overflow is a GPU type of infra/kubernetes/gpus.yaml: a100 or l4."
  }

  validation {
    condition     = var.nodes.max_gpus >= 1
    error_message = "At least one GPU."
  }
}

variable "objects_days" {
  description = "Days after which large inputs and results are deleted; longer than any cache.ttl_s of the catalogue."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.objects_days >= 1
    error_message = "At least a day."
  }
}

variable "prefix" {
  description = "First part of every name."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,10}$", var.prefix))
    error_message = "A prefix has 2 to 11 lower-case letters, digits or dashes."
  }
}

variable "project_id" {
  description = "Project of everything."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "A project id has 6 to 30 lower-case letters, digits or dashes."
  }
}

variable "regions" {
  description = "Regions that serve. `index` fixes a region's addresses and inbox numbers: never change it, never give it to another."
  type = map(object({
    index    = optional(number, 0)
    max_gpus = optional(number)
    zones    = optional(list(string))
  }))
  default  = { "europe-west4" = {} }
  nullable = false

  validation {
    condition     = length(var.regions) > 0
    error_message = "At least one region."
  }

  validation {
    condition     = length(distinct(values(var.regions)[*].index)) == length(var.regions)
    error_message = "Every region needs an index of its own."
  }

  validation {
    condition     = alltrue([for region in var.regions : region.index >= 0 && region.index < 16])
    error_message = "An index is 0 to 15."
  }
}

variable "secrets_version" {
  description = "Raise it to have new secrets made up."
  type        = number
  default     = 1
  nullable    = false
}

variable "storage_location" {
  description = "Location of the buckets: a region, EU or US."
  type        = string
  default     = "EU"
  nullable    = false
}
