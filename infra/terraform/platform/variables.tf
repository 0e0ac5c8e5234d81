# Variables of type `any` get their types, defaults and checks in
# modules/options. Each has to be in this list, except for the ephemeral
# alert_tokens.
locals {
  given = {
    alerts       = var.alerts
    analysts     = var.analysts
    api          = var.api
    armor        = var.armor
    batches      = var.batches
    budget       = var.budget
    cache        = var.cache
    delivery     = var.delivery
    functions    = var.functions
    inboxes      = var.inboxes
    invoices     = var.invoices
    nodes        = var.nodes
    objects_days = var.objects_days
    outside      = var.outside
    records      = var.records
    regions      = var.regions
    rows         = var.rows
    slos         = var.slos
    traces       = var.traces
    weights      = var.weights
  }
}

variable "alert_tokens" {
  description = "Tokens for alerts.slack and alerts.pagerduty: Slack's OAuth token, and each PagerDuty service's integration key. They are never stored in a plan or state, so pass them to any apply that creates a channel or increments alerts.tokens_version."
  type        = any
  default     = {}
  ephemeral   = true
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.alert_tokens), ["pagerduty", "slack"])) == 0
    error_message = "alert_tokens: unknown field; use only pagerduty and slack." # names none: they are secret
  }

  validation {
    condition     = alltrue([for token in concat(try([var.alert_tokens.slack], []), try(values(var.alert_tokens.pagerduty), [])) : token == null ? true : can(regex("^[!-~]+$", token))])
    error_message = "alert_tokens: tokens must not contain spaces or line breaks."
  }
}

variable "alerts" {
  description = "Alert recipients: emails and Slack channels get all alerts, PagerDuty services only critical ones. runbook_url: https URL of docs/how-to/troubleshoot.md (null: notifications only name its section). oldest_job_s: age in seconds at which a waiting job raises an alert."
  type        = any
  default     = {}
  nullable    = false
}

variable "analysts" {
  description = "Members who may read a tenant's rows in BigQuery, such as group:analysts@example.com, by tenant name. Each tenant gets a dataset of views, DATASET_tenant_NAME."
  type        = any
  default     = {}
  nullable    = false
}

variable "api" {
  description = "The API on Cloud Run, and how long it keeps predictions and responses stored under an Idempotency-Key. keys_in_redis: API keys are in the records Redis, where the admin API can change them. Without an image, the API is not created, because the first apply creates the registry that the image is pushed to."
  type        = any
  default     = {}
  nullable    = false
}

variable "armor" {
  description = "Maximum requests per minute from one address. Above requests_per_min, requests are rejected; above ban_above_per_min, the address is banned for a minute."
  type        = any
  default     = {}
  nullable    = false
}

variable "batches" {
  description = "Batch runners (/v1/batches), as instances of a Cloud Run worker pool. With none, batches wait until they expire, unless a runner exists elsewhere. Each runner has an inbox in the home region."
  type        = any
  default     = {}
  nullable    = false
}

variable "budget" {
  description = "The project's monthly budget, in units of the currency; null: none. Applying it requires permissions on the billing account."
  type        = any
  default     = null
}

variable "cache" {
  description = "Memorystore for Valkey in each region: size, version, and replicas."
  type        = any
  default     = {}
  nullable    = false
}

variable "dataset" {
  description = "BigQuery dataset for the rows."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_]+$", var.dataset)) && length(var.dataset) <= 1024
    error_message = "dataset: must have at most 1024 letters, digits and underscores."
  }
}

variable "dataset_location" {
  description = "Location of the dataset: a region, EU, or US."
  type        = string
  default     = "EU"
  nullable    = false

  validation {
    condition     = contains(local.locations, var.dataset_location)
    error_message = "dataset_location: must be EU, US or a region in platform/places.tf."
  }
}

variable "deletion_protection" {
  description = "If true, services, caches, clusters, and the table can't be deleted, and buckets and the dataset can't be deleted unless they are empty."
  type        = bool
  default     = true
  nullable    = false
}

variable "delivery" {
  description = "Lease, retention, and redelivery settings of the workers' subscriptions."
  type        = any
  default     = {}
  nullable    = false
}

variable "domain" {
  description = "Domain of the API. Its A record must point to the output `address`. Null: no load balancer, and each region has a run.app address."
  type        = string
  default     = null

  validation {
    condition     = var.domain == null ? true : can(regex("^([a-z0-9]([a-z0-9-]*[a-z0-9])?[.])+[a-z]{2,}$", var.domain))
    error_message = "domain: must be a domain in lower case, such as api.example.com."
  }
}

variable "functions" {
  description = "Function images; a function exists once its image is set. reports also has the time of the daily run (schedule, in cron format) and the billing time zone (time_zone)."
  type        = any
  default     = {}
  nullable    = false
}

variable "gpu_hour_usd" {
  description = "USD per hour for a machine's GPU, by GPU type, for the dashboard's costs. Default: on-demand prices in the home region, from infra/terraform/prices.yaml."
  type        = map(number)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for type, usd in var.gpu_hour_usd : usd >= 0])
    error_message = "gpu_hour_usd: prices must be at least 0."
  }
}

variable "inboxes" {
  description = "The pool of reply inboxes: inboxes per region, and slots per inbox. Use twice as many inboxes as API instances, so that a new revision can start alongside the old one. kept_slots: slots to keep while revisions that use more slots are still running; needed only to lower slots."
  type        = any
  default     = {}
  nullable    = false
}

variable "invoices" {
  description = "Invoice terms, for the API and the reports function: seller (name and address, in lines) and a tax on the total (tax_name, and tax_percent from 0 to 100). Default: no seller and no tax."
  type        = any
  default     = {}
  nullable    = false
}

variable "keep_messages_in_regions" {
  description = "If true, Pub/Sub stores messages only in the regions in `regions`."
  type        = bool
  default     = false
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource that supports them."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value))])
    error_message = "labels: keys and values must have at most 63 lowercase letters, digits, underscores and hyphens, and keys must start with a letter."
  }

  validation {
    condition     = length(var.labels) <= 60 && alltrue([for key in keys(var.labels) : !startswith(key, "goog")])
    error_message = "labels: must be at most 60 (Google allows 64, including ours), and no key may start with goog."
  }
}

variable "models_file" {
  description = "The catalog; null: models.yaml in the root of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.models_file == null ? true : fileexists(var.models_file)
    error_message = "models_file: the file does not exist."
  }

  validation {
    condition     = var.models_file == null ? true : try(length(yamldecode(file(var.models_file)).models[*].name) > 0, !fileexists(var.models_file))
    error_message = "models_file: must be YAML with a list `models`, in which each entry has a name."
  }

  # Long names end in a hash, so only short ones can meet.
  validation {
    condition = try(alltrue([
      for plain, names in {
        for name in flatten([
          for entry in yamldecode(file(coalesce(var.models_file, "${path.module}/../../../models.yaml"))).models :
          try(entry.canary, null) == null ? [entry.name] : [entry.name, "${entry.name}.canary"]
        ]) : trim(replace(lower(name), "/[^a-z0-9]+/", "-"), "-") => name...
      } : length(names) == 1 || length(plain) > 40
    ]), true)
    error_message = "models_file: two models have the same name in Kubernetes, where bge.large and bge-large are both bge-large. Rename one."
  }

  validation {
    condition = try(alltrue([
      for names in [flatten(yamldecode(file(coalesce(var.models_file, "${path.module}/../../../models.yaml"))).workers[*].models)] :
      length(distinct(names)) == length(names)
      && length(setsubtract(names, yamldecode(file(coalesce(var.models_file, "${path.module}/../../../models.yaml"))).models[*].name)) == 0
    ]), true)
    error_message = "models_file: the lists in `workers` must contain only names from `models`, each at most once."
  }
}

variable "namespace" {
  description = "The workers' Kubernetes namespace. Their permissions include it."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$", var.namespace))
    error_message = "namespace: must have at most 42 lowercase letters, digits or hyphens, and not start or end with a hyphen."
  }

  validation {
    condition     = !startswith(var.namespace, "kube-") && !startswith(var.namespace, "gke-") && !startswith(var.namespace, "gmp-") && !contains(["default", "keda"], var.namespace)
    error_message = "namespace: must be reserved for the workers, so not default, keda, or a namespace of Kubernetes or GKE."
  }
}

variable "network_cidr" {
  description = "Address range of all regions, at least a /10; each region gets a sixteenth."
  type        = string
  default     = "10.64.0.0/10"
  nullable    = false

  validation {
    condition     = try(tonumber(split("/", var.network_cidr)[1]) <= 10 && cidrhost(var.network_cidr, 0) == split("/", var.network_cidr)[0], false)
    error_message = "network_cidr: must be a block of at least a /10, written with its first address, such as 10.64.0.0/10."
  }

  validation {
    condition = anytrue([
      can(regex("^10[.][0-9.]+/(8|9|10)$", var.network_cidr)), can(regex("^100[.]64[.]0[.]0/10$", var.network_cidr))
    ])
    error_message = "network_cidr: must be in 10.0.0.0/8, or be 100.64.0.0/10; other blocks of that size contain public addresses."
  }
}

variable "nodes" {
  description = "Nodes of the clusters. compute_classes: uses ComputeClasses instead of node pools. overflow: GPU type to use when another is out of stock."
  type        = any
  default     = {}
  nullable    = false
}

variable "objects_days" {
  description = "Days after which objects are deleted, by folder: responses stored under an Idempotency-Key, batches with their files, prediction files, inputs (including inputs of dead letters), and results."
  type        = any
  default     = {}
  nullable    = false
}

variable "outside" {
  description = "Clusters outside Google whose workers pull the same jobs: the issuer of their tokens (and its keys, if Google can't reach it), their models (null: all), and a Redis for their cache (null: the home region's). They must be able to reach the records Redis; see docs/how-to/deploy.md."
  type        = any
  default     = {}
  nullable    = false
}

variable "prefix" {
  description = "First part of every resource name."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,9}[a-z0-9]$", var.prefix))
    error_message = "prefix: must have 2 to 11 lowercase letters, digits or hyphens, start with a letter and not end in a hyphen."
  }

  validation {
    condition     = !startswith(var.prefix, "goog") && !startswith(var.prefix, "gcp")
    error_message = "prefix: must not start with goog or gcp, which Google reserves."
  }
}

variable "project_id" {
  description = "Project in which everything is created."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id: must have 6 to 30 lowercase letters, digits or hyphens. It is the project's ID, not its number or name."
  }
}

variable "records" {
  description = "Redis for the records. apart: uses a separate instance, as required with several regions; null: only if there are several."
  type        = any
  default     = {}
  nullable    = false
}

variable "regions" {
  description = "Regions with an API and a cluster. index: determines the region's addresses and inbox numbers, so never change it or reuse it for another region. drained: the load balancer sends no requests there. overflow: overrides nodes.overflow; may be none. reservations: reserved machines by GPU type, which are used first. zones: zones for the nodes; GPU nodes use only the zones that have the GPU (infra/kubernetes/gpus.yaml)."
  type        = any
  default     = { "europe-west4" = {} }
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe, or us, so that nodes can pull images while a region is down, or a single region. Required, because changing it creates a new registry and deletes the previous one with its images."
  type        = string
  default     = null

  # Before 0.2 it was the home region. A default would replace such a registry.
  validation {
    condition     = var.registry_location != null
    error_message = "registry_location: is required. For a new deployment, use registry_location = \"${local.continent}\". A deployment created before release 0.2 has its registry in its home region: registry_location = \"${local.home}\". Any other location deletes the registry with its images."
  }

  validation {
    condition     = var.registry_location == null ? true : contains(concat(local.continents, local.google_regions), var.registry_location)
    error_message = "registry_location: must be asia, europe, us or a region in platform/places.tf."
  }
}

variable "rows" {
  description = "Rows are written to a bucket. Every every_s seconds, the row archive moves them to Parquet files and BigQuery. memory: memory of the archive's process. archive = false: rows go directly to BigQuery, and are lost with their pod while BigQuery is unreachable."
  type        = any
  default     = {}
  nullable    = false
}

variable "secrets_version" {
  description = "Increment to generate new secrets."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.secrets_version >= 1 && floor(var.secrets_version) == var.secrets_version
    error_message = "secrets_version: must be a whole number, at least 1."
  }
}

variable "slos" {
  description = "Objectives over 28 days: share of requests that must not fail, and share of items that must be on time. An alert about a burning budget requires least_bad_events in its window."
  type        = any
  default     = {}
  nullable    = false
}

variable "storage_location" {
  description = "Location of the buckets: a region, EU, or US."
  type        = string
  default     = "EU"
  nullable    = false

  validation {
    condition     = contains(local.locations, var.storage_location)
    error_message = "storage_location: must be EU, US or a region in platform/places.tf."
  }
}

variable "traces" {
  description = "Collector that spans are sent to by OTLP over HTTP: https://telemetry.googleapis.com, or a URL that the API and functions can reach; null: none. workers_endpoint: a different collector for the workers, in their cluster. ratio: share of traces to keep. sampler: OTEL_TRACES_SAMPLER, which determines whether the ratio also applies to callers that send a trace."
  type        = any
  default     = {}
  nullable    = false
}

variable "weights" {
  description = "Weights of Hub models. prefetched: workers read them from the weights bucket, which `penstock weights prefetch` fills. hub_token: creates a secret for a Hugging Face Hub token, for gated models that are not prefetched."
  type        = any
  default     = {}
  nullable    = false
}
