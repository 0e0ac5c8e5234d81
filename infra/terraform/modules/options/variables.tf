variable "given" {
  description = "The stage's object variables as passed in, including attributes that are not in the type of `options`."
  type        = any
  nullable    = false
}

variable "known" {
  description = "Values for the checks, from Google's offerings and the catalog."
  type        = any
  nullable    = false
}

variable "options" {
  description = "The stage's object variables, with types and defaults."
  type = object({
    alerts = optional(object({
      emails         = optional(list(string), [])
      oldest_job_s   = optional(number, 60)
      pagerduty      = optional(list(string), [])
      runbook_url    = optional(string)
      slack          = optional(list(string), [])
      tokens_version = optional(number, 1)
    }), {})
    analysts = optional(map(object({ members = list(string) })), {})
    api = optional(object({
      concurrency        = optional(number, 80)
      cpu                = optional(number, 2)
      idempotency_keep_s = optional(number, 86400)
      image              = optional(string)
      keys_in_redis      = optional(bool, false)
      max_in_flight      = optional(number, 8192)
      max_instances      = optional(number, 4)
      memory             = optional(string, "1Gi")
      metrics_image      = optional(string, "us-docker.pkg.dev/cloud-ops-agents-artifacts/cloud-run-gmp-sidecar/cloud-run-gmp-sidecar:1.8.0")
      min_instances      = optional(number, 1)
      prediction_keep_s  = optional(number, 3600)
      timeout_s          = optional(number, 360)
    }), {})
    armor = optional(object({
      ban_above_per_min = optional(number, 12000)
      requests_per_min  = optional(number, 6000)
    }), {})
    batches = optional(object({
      instances = optional(number, 0)
      memory    = optional(string, "1Gi")
    }), {})
    budget = optional(object({
      billing_account = string
      currency        = optional(string, "USD")
      units_per_month = number
    }))
    cache = optional(object({
      backup_days    = optional(number, 7)
      engine_version = optional(string, "VALKEY_8_0")
      from_backup    = optional(string)
      maintenance    = optional(object({ day = optional(string, "SUNDAY"), hour_utc = optional(number, 3) }), {})
      node_type      = optional(string, "STANDARD_SMALL")
      replicas       = optional(number, 1)
    }), {})
    delivery = optional(object({
      ack_deadline_s        = optional(number, 10)
      max_delivery_attempts = optional(number, 5)
      retention_s           = optional(number, 3600)
      retry_max_s           = optional(number, 10)
      retry_min_s           = optional(number, 0.1)
    }), {})
    functions = optional(object({
      dead_letters = optional(object({ image = string }))
      reports = optional(object({
        image     = string
        schedule  = optional(string, "0 4 * * *")
        time_zone = optional(string, "UTC")
      }))
      webhooks = optional(object({ image = string }))
    }), {})
    inboxes = optional(object({
      kept_slots = optional(number)
      per_region = optional(number, 8)
      slots      = optional(number, 8)
    }), {})
    invoices = optional(object({
      seller      = optional(string)
      tax_name    = optional(string)
      tax_percent = optional(number)
    }), {})
    nodes = optional(object({
      binary_authorization = optional(bool, false)
      compute_classes      = optional(bool, false)
      general              = optional(object({ machine_type = optional(string), max = optional(number), min = optional(number) }), {})
      max_gpus             = optional(number, 8)
      min_version          = optional(string, "1.35.0-gke.1171000")
      overflow             = optional(string)
      preloaded_images     = optional(map(string), {})
      release_channel      = optional(string, "REGULAR")
      spot                 = optional(bool, true)
    }), {})
    objects_days = optional(object({
      answers = optional(number, 2)
      batches = optional(number, 31)
      files   = optional(number, 1)
      inputs  = optional(number, 8)
      results = optional(number, 7)
    }), {})
    outside = optional(map(object({
      issuer     = string
      jwks_json  = optional(string)
      models     = optional(list(string))
      namespace  = optional(string, "penstock")
      redis_cidr = optional(string)
      redis_url  = optional(string)
    })), {})
    records = optional(object({
      apart          = optional(bool)
      backup_days    = optional(number, 7)
      engine_version = optional(string, "VALKEY_8_0")
      from_backup    = optional(string)
      maintenance    = optional(object({ day = optional(string, "SUNDAY"), hour_utc = optional(number, 3) }), {})
      node_type      = optional(string, "STANDARD_SMALL")
      replicas       = optional(number, 1)
    }), {})
    regions = optional(map(object({
      drained  = optional(bool, false)
      index    = optional(number, 0)
      max_gpus = optional(number)
      overflow = optional(string)
      zones    = optional(list(string))
      # By GPU type.
      reservations = optional(map(object({ name = string, zone = string, project = optional(string) })), {})
    })), { "europe-west4" = {} })
    rows = optional(object({
      archive = optional(bool, true)
      every_s = optional(number, 120)
      memory  = optional(string, "4Gi")
    }), {})
    slos = optional(object({
      availability     = optional(number, 0.999)
      deadlines        = optional(number, 0.99)
      least_bad_events = optional(number, 10)
    }), {})
    traces = optional(object({
      endpoint         = optional(string)
      ratio            = optional(number, 0.01)
      sampler          = optional(string, "parentbased_traceidratio")
      workers_endpoint = optional(string)
    }), {})
    weights = optional(object({
      hub_token  = optional(bool, false)
      prefetched = optional(bool, false)
    }), {})
  })
  nullable = false

  validation {
    condition     = alltrue([for email in var.options.alerts.emails : can(regex("^[^@ ]+@[^@ ]+[.][^@ ]+$", email))])
    error_message = "alerts.emails: each must be an email address, such as oncall@example.com."
  }

  validation {
    condition     = alltrue([for channel in var.options.alerts.slack : can(regex("^#[a-z0-9_-]{1,79}$", channel))])
    error_message = "alerts.slack: each must be a channel, such as #oncall."
  }

  validation {
    condition     = length(distinct(var.options.alerts.pagerduty)) == length(var.options.alerts.pagerduty) && alltrue([for service in var.options.alerts.pagerduty : can(regex("^[A-Za-z0-9 _-]{1,60}$", service))])
    error_message = "alerts.pagerduty: each must be the name of a service, such as inference, and must not be repeated."
  }

  validation {
    condition     = var.options.alerts.tokens_version >= 1 && floor(var.options.alerts.tokens_version) == var.options.alerts.tokens_version
    error_message = "alerts.tokens_version: must be a whole number, at least 1."
  }

  validation {
    condition     = var.options.alerts.runbook_url == null || can(regex("^https://[^ #]+$", var.options.alerts.runbook_url))
    error_message = "alerts.runbook_url: must be an https URL without a fragment (#…)."
  }

  validation {
    condition     = var.options.alerts.oldest_job_s >= 1
    error_message = "alerts.oldest_job_s: must be at least 1."
  }

  # The name is in the SQL of views.
  validation {
    condition     = alltrue([for tenant in keys(var.options.analysts) : can(regex("^[A-Za-z0-9][A-Za-z0-9 ._@:/-]{0,127}$", tenant))])
    error_message = "analysts: a tenant's name must start with a letter or digit and may contain only letters, digits, spaces and . _ @ : / - (at most 128 characters)."
  }

  validation {
    condition     = length(distinct([for tenant in keys(var.options.analysts) : replace(lower(tenant), "/[^a-z0-9]/", "_")])) == length(var.options.analysts)
    error_message = "analysts: two tenants would share a dataset, because its name is DATASET_tenant_NAME in lower case, with _ for every character that is not a letter or digit."
  }

  validation {
    condition     = alltrue(flatten([for analysts in values(var.options.analysts) : [for member in analysts.members : can(regex("^(user|group|serviceAccount|principal|principalSet):[^ ]+$", member))]]))
    error_message = "analysts.<tenant>.members: each must start with user:, group:, serviceAccount:, principal: or principalSet:, as in user:ann@example.com. Public members such as allUsers are not allowed."
  }

  validation {
    condition     = var.options.api.min_instances >= 1 && var.options.api.min_instances <= var.options.api.max_instances
    error_message = "api.min_instances: must be at least 1 and at most api.max_instances."
  }

  validation {
    condition = alltrue([
      for name in ["concurrency", "cpu", "idempotency_keep_s", "max_in_flight", "max_instances", "min_instances", "prediction_keep_s", "timeout_s"] :
      floor(var.options.api[name]) == var.options.api[name]
    ])
    error_message = "api: all numbers must be whole numbers."
  }

  validation {
    condition     = var.options.api.prediction_keep_s >= 60 && var.options.api.idempotency_keep_s > 0
    error_message = "api.prediction_keep_s: must be at least 60; api.idempotency_keep_s must be greater than 0."
  }

  validation {
    condition     = var.options.api.timeout_s > var.known.longest_deadline_s
    error_message = "api.timeout_s: must be greater than every model's deadline.longest_s, because callers may wait that long."
  }

  validation {
    condition     = var.options.api.concurrency >= 1 && var.options.api.concurrency <= 1000 && var.options.api.timeout_s <= 3600
    error_message = "api.concurrency: must be from 1 to 1000; api.timeout_s must be at most 3600. These are Cloud Run's limits."
  }

  validation {
    condition     = contains([1, 2, 4, 6, 8], var.options.api.cpu) && var.options.api.max_in_flight >= 1
    error_message = "api.cpu: must be 1, 2, 4, 6 or 8, as Cloud Run requires; api.max_in_flight must be at least 1."
  }

  validation {
    condition = try(
      tonumber(regex("^[0-9]+", var.options.api.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.api.memory)] >= var.known.api_memory_mib[var.options.api.cpu].least &&
      tonumber(regex("^[0-9]+", var.options.api.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.api.memory)] <= var.known.api_memory_mib[var.options.api.cpu].most,
      false
    )
    error_message = "api.memory: must have the form 1Gi or 512Mi. Cloud Run requires at least 512Mi (2Gi with 4 CPUs, 4Gi with more) and at most 4Gi per CPU."
  }

  validation {
    condition     = var.options.api.image == null ? true : can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", var.options.api.image))
    error_message = "api.image: must include a digest or a tag."
  }

  validation {
    condition     = can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", var.options.api.metrics_image))
    error_message = "api.metrics_image: must include a digest or a tag."
  }

  validation {
    condition     = var.options.armor.requests_per_min > 0 && var.options.armor.requests_per_min <= var.options.armor.ban_above_per_min
    error_message = "armor.requests_per_min: must be greater than 0 and at most armor.ban_above_per_min, so that requests are rejected before their sender is banned."
  }

  validation {
    condition     = alltrue([for count in values(var.options.armor) : floor(count) == count && count <= 1000000])
    error_message = "armor: all values must be whole numbers, at most 1000000."
  }

  validation {
    condition     = var.options.batches.instances >= 0 && floor(var.options.batches.instances) == var.options.batches.instances
    error_message = "batches.instances: must be a whole number, at least 0. One is enough; a second one takes over immediately if the first fails."
  }

  validation {
    condition = try(
      tonumber(regex("^[0-9]+", var.options.batches.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.batches.memory)] >= var.known.api_memory_mib[1].least &&
      tonumber(regex("^[0-9]+", var.options.batches.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.batches.memory)] <= var.known.api_memory_mib[1].most,
      false
    )
    error_message = "batches.memory: must have the form 1Gi or 512Mi, and be from 512Mi to 4Gi, which is what Cloud Run allows for a runner's one CPU."
  }

  validation {
    condition     = var.options.budget == null ? true : var.options.budget.units_per_month > 0 && floor(var.options.budget.units_per_month) == var.options.budget.units_per_month
    error_message = "budget.units_per_month: must be a whole number greater than 0."
  }

  validation {
    condition     = var.options.budget == null ? true : can(regex("^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$", var.options.budget.billing_account))
    error_message = "budget.billing_account: must have the form 012345-6789AB-CDEF01."
  }

  validation {
    condition     = var.options.budget == null ? true : can(regex("^[A-Z]{3}$", var.options.budget.currency))
    error_message = "budget.currency: must be the billing account's currency, as three capital letters, such as EUR."
  }

  validation {
    condition     = contains(var.known.redis_node_types, var.options.cache.node_type) && contains([0, 1, 2, 3, 4, 5], var.options.cache.replicas)
    error_message = "cache.node_type: must be SHARED_CORE_NANO, STANDARD_SMALL, HIGHMEM_MEDIUM or HIGHMEM_XLARGE; cache.replicas must be a whole number from 0 to 5."
  }

  validation {
    condition     = contains(var.known.valkey_versions, var.options.cache.engine_version)
    error_message = "cache.engine_version: must be one of ${join(", ", var.known.valkey_versions)}."
  }

  validation {
    condition     = var.options.cache.backup_days >= 0 && var.options.cache.backup_days <= 365 && floor(var.options.cache.backup_days) == var.options.cache.backup_days
    error_message = "cache.backup_days: must be a whole number from 0 (no backups) to 365."
  }

  validation {
    condition = (
      contains(["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"], var.options.cache.maintenance.day)
      && contains(range(24), var.options.cache.maintenance.hour_utc)
    )
    error_message = "cache.maintenance: day must be a weekday such as SUNDAY, and hour_utc a whole number from 0 to 23."
  }

  validation {
    condition     = var.options.cache.from_backup == null ? true : can(regex("^projects/[^/]+/locations/[^/]+/backupCollections/[^/]+/backups/[^/]+$", var.options.cache.from_backup))
    error_message = "cache.from_backup: must be a backup's full name: projects/P/locations/R/backupCollections/C/backups/B."
  }

  validation {
    condition     = var.options.delivery.retention_s >= max(600, var.known.longest_deadline_s) && var.options.delivery.retention_s <= 2678400
    error_message = "delivery.retention_s: must be from 600 to 2678400 (10 minutes to 31 days, Pub/Sub's limits), and at least every model's deadline.longest_s, because callers may wait that long for a job."
  }

  validation {
    condition     = var.options.delivery.ack_deadline_s >= 10 && var.options.delivery.ack_deadline_s <= 600
    error_message = "delivery.ack_deadline_s: must be from 10 to 600, Pub/Sub's limits."
  }

  validation {
    condition     = alltrue([for name in ["ack_deadline_s", "max_delivery_attempts", "retention_s"] : floor(var.options.delivery[name]) == var.options.delivery[name]])
    error_message = "delivery: ack_deadline_s, max_delivery_attempts and retention_s must be whole numbers."
  }

  validation {
    condition     = var.options.delivery.max_delivery_attempts >= 5 && var.options.delivery.max_delivery_attempts <= 100
    error_message = "delivery.max_delivery_attempts: must be from 5 to 100, Pub/Sub's limits."
  }

  validation {
    condition     = var.options.delivery.retry_min_s >= 0 && var.options.delivery.retry_min_s <= var.options.delivery.retry_max_s && var.options.delivery.retry_max_s <= 600
    error_message = "delivery.retry_min_s: must be at least 0 and at most delivery.retry_max_s, which must be at most 600."
  }

  validation {
    condition     = alltrue([for function in values(var.options.functions) : function == null ? true : can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", function.image))])
    error_message = "functions.<name>.image: must include a digest or a tag."
  }

  validation {
    condition     = var.options.functions.reports == null ? true : can(regex("^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}$", var.options.functions.reports.time_zone))
    error_message = "functions.reports.time_zone: must be an IANA time zone, such as Europe/Berlin."
  }

  validation {
    condition     = var.options.functions.reports == null ? true : can(regex("^[0-9*,/-]+( [0-9A-Za-z*,/-]+){4}$", var.options.functions.reports.schedule))
    error_message = "functions.reports.schedule: must have the five fields of a cron schedule, such as \"0 4 * * *\"."
  }

  validation {
    condition     = var.options.inboxes.per_region >= 2 * (var.options.api.max_instances + var.options.batches.instances)
    error_message = "inboxes.per_region: must be at least twice the sum of api.max_instances and batches.instances, because each API instance and batch runner of the old and new revisions leases one inbox."
  }

  validation {
    condition     = var.options.inboxes.per_region <= var.known.inbox_stride && floor(var.options.inboxes.per_region) == var.options.inboxes.per_region
    error_message = "inboxes.per_region: must be a whole number, at most ${var.known.inbox_stride}, because a region's inbox numbers start at ${var.known.inbox_stride} times its index."
  }

  validation {
    condition     = var.options.inboxes.slots >= 1 && var.options.inboxes.slots <= 200 && floor(var.options.inboxes.slots) == var.options.inboxes.slots
    error_message = "inboxes.slots: must be a whole number from 1 to 200."
  }

  validation {
    condition     = var.options.inboxes.kept_slots == null ? true : var.options.inboxes.kept_slots >= var.options.inboxes.slots && var.options.inboxes.kept_slots <= 200 && floor(var.options.inboxes.kept_slots) == var.options.inboxes.kept_slots
    error_message = "inboxes.kept_slots: must be a whole number from inboxes.slots to 200."
  }

  # Pub/Sub allows a project 10,000 subscriptions; the models need three each.
  validation {
    condition     = var.options.inboxes.per_region * (coalesce(var.options.inboxes.kept_slots, var.options.inboxes.slots) + 1) * length(var.options.regions) <= 9000
    error_message = "inboxes: regions x per_region x (slots + 1) must be at most 9000. Use fewer slots; requests then share them."
  }

  validation {
    condition     = var.options.invoices.tax_percent == null ? true : var.options.invoices.tax_percent >= 0 && var.options.invoices.tax_percent <= 100
    error_message = "invoices.tax_percent: must be from 0 to 100."
  }

  validation {
    condition     = var.options.nodes.overflow == null ? true : contains(keys(var.known.gpu_types), var.options.nodes.overflow)
    error_message = "nodes.overflow: must be one of the GPU types in infra/kubernetes/gpus.yaml: ${join(", ", keys(var.known.gpu_types))}."
  }

  validation {
    condition     = var.options.nodes.max_gpus >= 1 && var.options.nodes.max_gpus <= 1000 && floor(var.options.nodes.max_gpus) == var.options.nodes.max_gpus
    error_message = "nodes.max_gpus: must be a whole number from 1 to 1000, GKE's maximum number of nodes in a pool."
  }

  validation {
    condition = alltrue([
      for count in [var.options.nodes.general.min, var.options.nodes.general.max] : count == null ? true : count >= 1 && count <= 1000 && floor(count) == count
    ]) && try(var.options.nodes.general.min <= var.options.nodes.general.max, true)
    error_message = "nodes.general: min and max must be whole numbers from 1 to 1000, and min must not exceed max."
  }

  validation {
    condition     = var.options.nodes.general.machine_type == null ? true : can(regex("^[a-z][a-z0-9]*-[a-z0-9-]*[a-z0-9]$", var.options.nodes.general.machine_type))
    error_message = "nodes.general.machine_type: must be a machine type, such as e2-standard-4."
  }

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE", "EXTENDED"], var.options.nodes.release_channel)
    error_message = "nodes.release_channel: must be RAPID, REGULAR, STABLE or EXTENDED."
  }

  # Before it, GKE refuses shutdown_grace_period_seconds of spot pools, after the cluster was made.
  validation {
    condition     = can(regex("^1[.][0-9]+[.][0-9]+-gke[.][0-9]+$", var.options.nodes.min_version)) && tonumber(split(".", var.options.nodes.min_version)[1]) >= 35
    error_message = "nodes.min_version: must be a full GKE version, 1.35 or later, such as 1.35.0-gke.1171000. Earlier versions don't support the shutdown settings of spot nodes."
  }

  validation {
    condition     = alltrue([for days in values(var.options.objects_days) : days >= 1 && floor(days) == days])
    error_message = "objects_days: each value must be a whole number of days, at least 1."
  }

  validation {
    condition     = var.options.objects_days.batches >= 31
    error_message = "objects_days.batches: must be at least 31, because batch files are kept for up to 30 days."
  }

  validation {
    condition     = var.options.objects_days.answers * 86400 >= var.options.api.idempotency_keep_s + 3600
    error_message = "objects_days.answers: must be at least one hour longer than api.idempotency_keep_s, the time for which responses are kept."
  }

  validation {
    condition     = var.options.objects_days.inputs * 86400 >= var.known.dead_letter_retention_s + var.options.delivery.retention_s
    error_message = "objects_days.inputs: must be at least ${var.known.dead_letter_retention_s / 86400} days plus delivery.retention_s, because a dead letter can be run again only while its input exists."
  }

  # A hit in a cache's last second may be given to a prediction, and to a link that opens for an hour.
  validation {
    condition     = var.options.objects_days.results * 86400 >= var.known.longest_ttl_s + var.known.longest_deadline_s + max(var.options.api.prediction_keep_s, 3600)
    error_message = "objects_days.results: must be at least the sum of the longest cache.ttl_s, the longest deadline.longest_s, and api.prediction_keep_s (or an hour, if that is longer)."
  }

  validation {
    condition     = alltrue([for name in keys(var.options.outside) : can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", name))])
    error_message = "outside: a name must have 3 to 20 lowercase letters, digits or hyphens, start with a letter and not end in a hyphen. With the prefix, it names an identity pool."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : startswith(cluster.issuer, "https://")])
    error_message = "outside.<name>.issuer: must be an https URL, as in the cluster's tokens."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : can(regex("^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$", cluster.namespace))])
    error_message = "outside.<name>.namespace: must have at most 42 lowercase letters, digits or hyphens, and not start or end with a hyphen, so that a subject has at most 127 characters."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : cluster.models == null ? true : length(setsubtract(cluster.models, keys(var.known.models))) == 0])
    error_message = "outside.<name>.models: each must be the name of a model in models.yaml."
  }

  validation {
    condition = alltrue([
      for cluster in values(var.options.outside) : cluster.models == null ? true : alltrue([
        for name, model in var.known.models : contains(cluster.models, trimsuffix(name, ".canary"))
        if contains([for chosen in cluster.models : try(var.known.models[chosen].worker, "")], model.worker)
      ])
    ])
    error_message = "outside.<name>.models: models that share workers (`workers` in models.yaml) must run together; list all of them or none."
  }

  validation {
    condition = alltrue([
      for cluster in values(var.options.outside) :
      (cluster.redis_url == null) == (cluster.redis_cidr == null) && (cluster.redis_cidr == null ? true : can(cidrhost(cluster.redis_cidr, 0)))
    ])
    error_message = "outside.<name>: set both redis_url and redis_cidr (the addresses that its workers may connect to), or neither."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : cluster.redis_url == null ? true : can(regex("^rediss?://[^/]+:6379/[0-9]+$", cluster.redis_url))])
    error_message = "outside.<name>.redis_url: must have the form redis://HOST:6379/0; workers may not connect to any other port."
  }

  validation {
    condition     = coalesce(var.options.records.apart, true) || length(var.options.regions) == 1
    error_message = "records.apart: must not be false if there are several regions. They share their topics, so any of them may take a job, and they need one Redis for the records."
  }

  validation {
    condition     = contains(var.known.redis_node_types, var.options.records.node_type) && contains([0, 1, 2, 3, 4, 5], var.options.records.replicas)
    error_message = "records.node_type: must be SHARED_CORE_NANO, STANDARD_SMALL, HIGHMEM_MEDIUM or HIGHMEM_XLARGE; records.replicas must be a whole number from 0 to 5."
  }

  validation {
    condition     = contains(var.known.valkey_versions, var.options.records.engine_version)
    error_message = "records.engine_version: must be one of ${join(", ", var.known.valkey_versions)}."
  }

  validation {
    condition     = var.options.records.backup_days >= 0 && var.options.records.backup_days <= 365 && floor(var.options.records.backup_days) == var.options.records.backup_days
    error_message = "records.backup_days: must be a whole number from 0 (no backups) to 365."
  }

  validation {
    condition = (
      contains(["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"], var.options.records.maintenance.day)
      && contains(range(24), var.options.records.maintenance.hour_utc)
    )
    error_message = "records.maintenance: day must be a weekday such as SUNDAY, and hour_utc a whole number from 0 to 23."
  }

  validation {
    condition     = var.options.records.from_backup == null ? true : can(regex("^projects/[^/]+/locations/[^/]+/backupCollections/[^/]+/backups/[^/]+$", var.options.records.from_backup))
    error_message = "records.from_backup: must be a backup's full name: projects/P/locations/R/backupCollections/C/backups/B."
  }

  validation {
    condition     = length(var.options.regions) > 0
    error_message = "regions: must have at least one region."
  }

  validation {
    condition     = length(distinct(values(var.options.regions)[*].index)) == length(var.options.regions)
    error_message = "regions.<name>.index: must be different for each region."
  }

  validation {
    condition     = alltrue([for region in var.options.regions : region.index >= 0 && region.index < 16 && floor(region.index) == region.index])
    error_message = "regions.<name>.index: must be a whole number from 0 to 15."
  }

  validation {
    condition     = length(setsubtract(keys(var.options.regions), var.known.google_regions)) == 0
    error_message = "regions: not in platform/places.tf: ${join(", ", setsubtract(keys(var.options.regions), var.known.google_regions))}."
  }

  validation {
    condition = alltrue([
      for region in var.options.regions : region.max_gpus == null ? true : region.max_gpus >= 1 && region.max_gpus <= 1000 && floor(region.max_gpus) == region.max_gpus
    ])
    error_message = "regions.<name>.max_gpus: must be a whole number from 1 to 1000, GKE's maximum number of nodes in a pool."
  }

  validation {
    condition = alltrue(flatten([
      for name, region in var.options.regions : region.zones == null ? [true] : concat(
        [length(region.zones) > 0, length(distinct(region.zones)) == length(region.zones)],
        [for zone in region.zones : can(regex("^${name}-[a-z]$", zone))],
      )
    ]))
    error_message = "regions.<name>.zones: must list at least one zone of that region, such as europe-west4-a, without repeats."
  }

  validation {
    condition     = alltrue([for region in var.options.regions : region.overflow == null ? true : region.overflow == "none" || contains(keys(var.known.gpu_types), region.overflow)])
    error_message = "regions.<name>.overflow: must be \"none\" or one of the GPU types in infra/kubernetes/gpus.yaml: ${join(", ", keys(var.known.gpu_types))}."
  }

  validation {
    condition     = length(var.options.regions) == 0 || anytrue([for region in var.options.regions : !region.drained])
    error_message = "regions: at least one region must not be drained."
  }

  # BigQuery allows a table 1,500 load jobs a day, failed ones included, and a backlog needs some too.
  validation {
    condition     = var.options.rows.every_s >= 90 && var.options.rows.every_s <= 3600 && floor(var.options.rows.every_s) == var.options.rows.every_s
    error_message = "rows.every_s: must be a whole number from 90 to 3600. Each pass is a load job, and BigQuery allows 1,500 per table and day."
  }

  validation {
    condition     = can(regex("^[24]Gi$", var.options.rows.memory))
    error_message = "rows.memory: must be 2Gi or 4Gi. A pass runs in memory, and Cloud Run allows at most 4Gi with one CPU."
  }

  # Below 0.931 a total outage does not burn 14.4 times the budget.
  validation {
    condition     = alltrue([for share in [var.options.slos.availability, var.options.slos.deadlines] : 14.4 * (1 - share) < 1 && share < 1])
    error_message = "slos.availability and slos.deadlines: must be at least 0.931 and less than 1. With less, a total outage would not trigger the alert (14.4 times the budget); 1 leaves no budget."
  }

  validation {
    condition     = var.options.slos.least_bad_events >= 1 && floor(var.options.slos.least_bad_events) == var.options.slos.least_bad_events
    error_message = "slos.least_bad_events: must be a whole number, at least 1."
  }

  validation {
    condition     = alltrue([for url in [var.options.traces.endpoint, var.options.traces.workers_endpoint] : url == null ? true : can(regex("^https?://[^ /?#]+$", url))])
    error_message = "traces: endpoint and workers_endpoint must be URLs without a path, such as https://telemetry.googleapis.com."
  }

  validation {
    condition     = var.options.traces.ratio >= 0 && var.options.traces.ratio <= 1
    error_message = "traces.ratio: must be from 0 to 1."
  }

  validation {
    condition     = contains(["parentbased_traceidratio", "traceidratio"], var.options.traces.sampler)
    error_message = "traces.sampler: must be parentbased_traceidratio, or traceidratio to apply the ratio to callers that send a trace, too."
  }

  validation {
    condition     = var.options.traces.endpoint != null || var.options.traces.workers_endpoint == null
    error_message = "traces.workers_endpoint: requires traces.endpoint, because the workers' spans alone belong to no trace."
  }

  validation {
    condition     = !var.options.weights.hub_token || anytrue([for model in var.known.models : startswith(model.source, "hf:")])
    error_message = "weights.hub_token: must be false, because no model in models.yaml comes from the hub (source: hf:ORG/NAME)."
  }
}
