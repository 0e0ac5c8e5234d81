variable "alert_tokens" {
  description = "Tokens for alerts.slack and alerts.pagerduty: Slack's OAuth token, and the integration key of each PagerDuty service. Never stored in a plan or state: an apply that creates a channel, or raises alerts.tokens_version, needs them."
  type        = any
  default     = {}
  ephemeral   = true
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.alert_tokens), ["pagerduty", "slack"])) == 0
    error_message = "There is no such option. There are alert_tokens.pagerduty, alert_tokens.slack." # names none: they are secret
  }

  validation {
    condition     = alltrue([for token in concat(try([var.alert_tokens.slack], []), try(values(var.alert_tokens.pagerduty), [])) : token == null ? true : can(regex("^[!-~]+$", token))])
    error_message = "alert_tokens are written without spaces or line ends."
  }
}

variable "alerts" {
  description = "Recipients: emails and Slack channels get all alerts, PagerDuty services only critical ones. And where the runbook can be read (a URL of docs/how-to/troubleshoot.md; null: notifications name its part only). oldest_job_s: the age at which a waiting job is told of."
  type        = any
  default     = {}
  nullable    = false
}

variable "analysts" {
  description = "Members who may read a tenant's rows in BigQuery, by tenant name, such as group:analysts@example.com. Each tenant has a data set of views, DATASET_tenant_NAME."
  type        = any
  default     = {}
  nullable    = false
}

variable "api" {
  description = "The API on Cloud Run, and for how long it keeps predictions and answers to Idempotency-Keys. With keys_in_redis API keys are in the Redis of the records, where the admin API can change them. Without an image there is none yet: the first apply makes the registry that it is pushed to."
  type        = any
  default     = {}
  nullable    = false
}

variable "armor" {
  description = "Requests a minute from one address: above the first they are refused, above the second it is banned for a minute."
  type        = any
  default     = {}
  nullable    = false
}

variable "batches" {
  description = "Batch runners (/v1/batches): instances of a Cloud Run worker pool. With none, batches wait until they expire, unless a runner is elsewhere. Each has an inbox of the home region."
  type        = any
  default     = {}
  nullable    = false
}

variable "budget" {
  description = "Monthly budget of the project, in units of the currency; null: none. The caller needs rights on the billing account."
  type        = any
  default     = null
}

variable "cache" {
  description = "Memorystore for Valkey in each region: size, version and copies."
  type        = any
  default     = {}
  nullable    = false
}

variable "dataset" {
  description = "BigQuery dataset of the rows."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_]+$", var.dataset)) && length(var.dataset) <= 1024
    error_message = "dataset has letters, digits and underscores, 1024 at most."
  }
}

variable "dataset_location" {
  description = "Location of the dataset: a region, EU or US."
  type        = string
  default     = "EU"
  nullable    = false

  validation {
    condition     = contains(local.locations, var.dataset_location)
    error_message = "dataset_location is EU, US or a region that platform/places.tf knows."
  }
}

variable "deletion_protection" {
  description = "True to protect services, caches, clusters and the table from deletion, and buckets and dataset from being emptied."
  type        = bool
  default     = true
  nullable    = false
}

variable "delivery" {
  description = "The workers' subscriptions: lease, retention and redelivery."
  type        = any
  default     = {}
  nullable    = false
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
  description = "Images of the functions; each exists as soon as it has one. reports: also when its daily run begins (schedule, of cron) and the billing zone (time_zone)."
  type        = any
  default     = {}
  nullable    = false
}

variable "gpu_hour_usd" {
  description = "Dollars per hour of a machine with one GPU, by type, for the dashboard's costs. Without one: on demand in the home region, from infra/terraform/prices.yaml."
  type        = map(number)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for type, usd in var.gpu_hour_usd : usd >= 0])
    error_message = "gpu_hour_usd has a price below 0."
  }
}

variable "inboxes" {
  description = "The pool of reply inboxes: how many for each region, and slots of each. Twice the API's instances, so that a new revision can start beside the old one. `kept_slots`: slots that stay while revisions with more of them serve; only to lower `slots`."
  type        = any
  default     = {}
  nullable    = false
}

variable "keep_messages_in_regions" {
  description = "True if Pub/Sub may store messages only in the regions in `regions`."
  type        = bool
  default     = false
  nullable    = false
}

variable "labels" {
  description = "Labels of every resource that takes them."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value))])
    error_message = "labels have lower-case letters, digits, underscores and dashes."
  }

  validation {
    condition     = length(var.labels) <= 60 && alltrue([for key in keys(var.labels) : !startswith(key, "goog")])
    error_message = "labels are 60 at most (Google allows 64 with ours), and none begins with goog."
  }
}

variable "models_file" {
  description = "The catalog; null: models.yaml at the top of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.models_file == null ? true : fileexists(var.models_file)
    error_message = "models_file: there is no such file."
  }

  validation {
    condition     = var.models_file == null ? true : try(length(yamldecode(file(var.models_file)).models[*].name) > 0, !fileexists(var.models_file))
    error_message = "models_file is YAML with a list `models`, of which each entry has a name."
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
    error_message = "models_file: two models have the same name to Kubernetes, where bge.large and bge-large are both bge-large. Rename one."
  }

  validation {
    condition = try(alltrue([
      for names in [flatten(yamldecode(file(coalesce(var.models_file, "${path.module}/../../../models.yaml"))).workers[*].models)] :
      length(distinct(names)) == length(names)
      && length(setsubtract(names, yamldecode(file(coalesce(var.models_file, "${path.module}/../../../models.yaml"))).models[*].name)) == 0
    ]), true)
    error_message = "models_file: the lists of `workers` name entries of `models`, each once."
  }
}

variable "namespace" {
  description = "Kubernetes namespace of the workers; their rights name it."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$", var.namespace))
    error_message = "namespace has at most 42 lower-case letters, digits or dashes."
  }

  validation {
    condition     = !startswith(var.namespace, "kube-") && !startswith(var.namespace, "gke-") && !startswith(var.namespace, "gmp-") && !contains(["default", "keda"], var.namespace)
    error_message = "namespace is the workers' own: not default, keda, or one of Kubernetes or GKE."
  }
}

variable "network_cidr" {
  description = "Addresses of all regions, a /10; each region takes a sixteenth."
  type        = string
  default     = "10.64.0.0/10"
  nullable    = false

  validation {
    condition     = try(tonumber(split("/", var.network_cidr)[1]) <= 10 && cidrhost(var.network_cidr, 0) == split("/", var.network_cidr)[0], false)
    error_message = "network_cidr is a block of at least a /10, written with its first address, as 10.64.0.0/10."
  }

  validation {
    condition = anytrue([
      can(regex("^10[.][0-9.]+/(8|9|10)$", var.network_cidr)), can(regex("^100[.]64[.]0[.]0/10$", var.network_cidr))
    ])
    error_message = "network_cidr lies in 10.0.0.0/8 or is 100.64.0.0/10: other blocks of that size are the internet's."
  }
}

variable "nodes" {
  description = "Nodes of the clusters. `compute_classes` takes nodes from ComputeClasses instead of node pools; `overflow` is the GPU type that takes over where another is out of stock."
  type        = any
  default     = {}
  nullable    = false
}

variable "objects_days" {
  description = "Days after which the objects of each folder are deleted: answers to Idempotency-Keys, batches with their files, files of predictions, inputs (those of dead letters too), results."
  type        = any
  default     = {}
  nullable    = false
}

variable "outside" {
  description = "Clusters outside Google whose workers pull the same jobs: issuer of their tokens (and its keys, where Google can't reach it), which models (null: all), and a Redis of theirs for the cache (null: the home region's). All need a way to the records' Redis, see docs/how-to/deploy.md."
  type        = any
  default     = {}
  nullable    = false
}

variable "prefix" {
  description = "First part of every name."
  type        = string
  default     = "penstock"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,9}[a-z0-9]$", var.prefix))
    error_message = "prefix has 2 to 11 lower-case letters, digits or dashes, and ends in no dash."
  }

  validation {
    condition     = !startswith(var.prefix, "goog") && !startswith(var.prefix, "gcp")
    error_message = "prefix begins neither with goog nor with gcp: Google keeps such names to itself."
  }
}

variable "project_id" {
  description = "Project of everything."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id has 6 to 30 lower-case letters, digits or dashes. It is the id, not the number or the name."
  }
}

variable "records" {
  description = "Redis of the records. `apart`: an instance of its own, which several regions need and one does without; null: as they need."
  type        = any
  default     = {}
  nullable    = false
}

variable "regions" {
  description = "Regions that serve. `index` fixes a region's addresses and inbox numbers: never change it, never give it to another. `drained`: the balancer sends it nothing. `overflow`: instead of nodes.overflow, or none. `reservations`: of machines with a GPU, by its type; they are used up first. `zones`: of the nodes; those with a GPU are in the zones of them that have it (infra/kubernetes/gpus.yaml)."
  type        = any
  default     = { "europe-west4" = {} }
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe or us, so that nodes get images while a region is out, or a region. It has to be said: another location is another registry, and the images of the one before are deleted with it."
  type        = string
  default     = null

  # Before 0.2 it was the home region. A default would replace such a registry.
  validation {
    condition     = var.registry_location != null
    error_message = "Say where the registry is. Of a new deployment: registry_location = \"${local.continent}\". One that was made before release 0.2 has it in its home region: registry_location = \"${local.home}\". Another location deletes the registry with its images."
  }

  validation {
    condition     = var.registry_location == null ? true : contains(concat(local.continents, local.google_regions), var.registry_location)
    error_message = "registry_location is asia, europe, us, or a region (platform/places.tf)."
  }
}

variable "rows" {
  description = "Rows are put into a bucket, from which the row archive takes them every every_s seconds, into Parquet files and BigQuery; memory: of its process. archive = false: they go straight to BigQuery, and are lost with their pod while that is away."
  type        = any
  default     = {}
  nullable    = false
}

variable "secrets_version" {
  description = "Raise it to have new secrets made up."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.secrets_version >= 1 && floor(var.secrets_version) == var.secrets_version
    error_message = "Versions count from 1."
  }
}

variable "slos" {
  description = "Objectives over 28 days: the share of requests that must not fail, and of items that must be answered in time. An alert on a burning budget needs least_bad_events in its window."
  type        = any
  default     = {}
  nullable    = false
}

variable "storage_location" {
  description = "Location of the buckets: a region, EU or US."
  type        = string
  default     = "EU"
  nullable    = false

  validation {
    condition     = contains(local.locations, var.storage_location)
    error_message = "storage_location is EU, US or a region that platform/places.tf knows."
  }
}

variable "traces" {
  description = "Where spans go, by OTLP over HTTP: https://telemetry.googleapis.com, or the URL of a collector that API and functions reach; null: nowhere. workers_endpoint: a collector in the workers' cluster, if not the same. ratio: the share of traces that is kept; sampler: of OTEL_TRACES_SAMPLER, whether it holds for callers that trace too."
  type        = any
  default     = {}
  nullable    = false
}

variable "weights" {
  description = "Where workers of hub models get weights. prefetched: from the weights bucket, which `penstock weights prefetch` fills. hub_token: a secret for a token of the Hugging Face hub, for gated models that are not prefetched."
  type        = any
  default     = {}
  nullable    = false
}
