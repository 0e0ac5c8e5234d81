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
    error_message = "Each of alerts.emails is an address, as oncall@example.com."
  }

  validation {
    condition     = alltrue([for channel in var.options.alerts.slack : can(regex("^#[a-z0-9_-]{1,79}$", channel))])
    error_message = "Each of alerts.slack is a channel, as #oncall."
  }

  validation {
    condition     = length(distinct(var.options.alerts.pagerduty)) == length(var.options.alerts.pagerduty) && alltrue([for service in var.options.alerts.pagerduty : can(regex("^[A-Za-z0-9 _-]{1,60}$", service))])
    error_message = "Each of alerts.pagerduty names a service once, as inference."
  }

  validation {
    condition     = var.options.alerts.tokens_version >= 1 && floor(var.options.alerts.tokens_version) == var.options.alerts.tokens_version
    error_message = "alerts.tokens_version counts from 1."
  }

  validation {
    condition     = var.options.alerts.runbook_url == null || can(regex("^https://[^ #]+$", var.options.alerts.runbook_url))
    error_message = "alerts.runbook_url is an https URL without a part (#…)."
  }

  validation {
    condition     = var.options.alerts.oldest_job_s >= 1
    error_message = "alerts.oldest_job_s is a second at least."
  }

  # The name is in the SQL of views.
  validation {
    condition     = alltrue([for tenant in keys(var.options.analysts) : can(regex("^[A-Za-z0-9][A-Za-z0-9 ._@:/-]{0,127}$", tenant))])
    error_message = "analysts: a tenant's name has letters, digits, spaces and . _ @ : / - here, 128 at most."
  }

  validation {
    condition     = length(distinct([for tenant in keys(var.options.analysts) : replace(lower(tenant), "/[^a-z0-9]/", "_")])) == length(var.options.analysts)
    error_message = "analysts: the names of two tenants give one data set, DATASET_tenant_NAME with _ for what is no letter or digit."
  }

  validation {
    condition     = alltrue(flatten([for analysts in values(var.options.analysts) : [for member in analysts.members : can(regex("^(user|group|serviceAccount|principal|principalSet):[^ ]+$", member))]]))
    error_message = "analysts.<tenant>.members are written as user:, group:, serviceAccount:, principal: or principalSet: with who it is. Everybody is nobody's analyst."
  }

  validation {
    condition     = var.options.api.min_instances >= 1 && var.options.api.min_instances <= var.options.api.max_instances
    error_message = "api.min_instances is one at least, and no more than api.max_instances."
  }

  validation {
    condition = alltrue([
      for name in ["concurrency", "cpu", "idempotency_keep_s", "max_in_flight", "max_instances", "min_instances", "prediction_keep_s", "timeout_s"] :
      floor(var.options.api[name]) == var.options.api[name]
    ])
    error_message = "The numbers of api are whole numbers."
  }

  validation {
    condition     = var.options.api.prediction_keep_s >= 60 && var.options.api.idempotency_keep_s > 0
    error_message = "api.prediction_keep_s is 60 at least, and api.idempotency_keep_s more than 0."
  }

  validation {
    condition     = var.options.api.timeout_s > var.known.longest_deadline_s
    error_message = "A caller may wait as long as deadline.longest_s of its model: Cloud Run must wait longer (api.timeout_s)."
  }

  validation {
    condition     = var.options.api.concurrency >= 1 && var.options.api.concurrency <= 1000 && var.options.api.timeout_s <= 3600
    error_message = "Cloud Run allows 1 to 1000 requests per instance (api.concurrency), of an hour at most (api.timeout_s)."
  }

  validation {
    condition     = contains([1, 2, 4, 6, 8], var.options.api.cpu) && var.options.api.max_in_flight >= 1
    error_message = "Cloud Run has instances of 1, 2, 4, 6 or 8 CPUs (api.cpu); api.max_in_flight is 1 at least."
  }

  validation {
    condition = try(
      tonumber(regex("^[0-9]+", var.options.api.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.api.memory)] >= var.known.api_memory_mib[var.options.api.cpu].least &&
      tonumber(regex("^[0-9]+", var.options.api.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.api.memory)] <= var.known.api_memory_mib[var.options.api.cpu].most,
      false
    )
    error_message = "api.memory is written as 1Gi or 512Mi. Cloud Run wants 512Mi at least (2Gi with 4 CPUs, 4Gi with more), and at most 4Gi for each CPU."
  }

  validation {
    condition     = var.options.api.image == null ? true : can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", var.options.api.image))
    error_message = "api.image is named with a digest or a tag."
  }

  validation {
    condition     = can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", var.options.api.metrics_image))
    error_message = "api.metrics_image is named with a digest or a tag."
  }

  validation {
    condition     = var.options.armor.requests_per_min > 0 && var.options.armor.requests_per_min <= var.options.armor.ban_above_per_min
    error_message = "armor.requests_per_min is more than 0, and no more than armor.ban_above_per_min: a ban comes after refusals."
  }

  validation {
    condition     = alltrue([for count in values(var.options.armor) : floor(count) == count && count <= 1000000])
    error_message = "armor has whole numbers, a million at most."
  }

  validation {
    condition     = var.options.batches.instances >= 0 && floor(var.options.batches.instances) == var.options.batches.instances
    error_message = "batches.instances is a whole number. One is enough, a second one takes over at once."
  }

  validation {
    condition = try(
      tonumber(regex("^[0-9]+", var.options.batches.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.batches.memory)] >= var.known.api_memory_mib[1].least &&
      tonumber(regex("^[0-9]+", var.options.batches.memory)) * { Mi = 1, Gi = 1024 }[regex("[A-Za-z]+$", var.options.batches.memory)] <= var.known.api_memory_mib[1].most,
      false
    )
    error_message = "batches.memory is written as 1Gi or 512Mi; a runner has one CPU, for which Cloud Run allows 512Mi to 4Gi."
  }

  validation {
    condition     = var.options.budget == null ? true : var.options.budget.units_per_month > 0 && floor(var.options.budget.units_per_month) == var.options.budget.units_per_month
    error_message = "budget.units_per_month is a whole number above 0."
  }

  validation {
    condition     = var.options.budget == null ? true : can(regex("^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$", var.options.budget.billing_account))
    error_message = "budget.billing_account looks like 012345-6789AB-CDEF01."
  }

  validation {
    condition     = var.options.budget == null ? true : can(regex("^[A-Z]{3}$", var.options.budget.currency))
    error_message = "budget.currency has three capitals, as EUR: the billing account's own."
  }

  validation {
    condition     = contains(var.known.redis_node_types, var.options.cache.node_type) && contains([0, 1, 2, 3, 4, 5], var.options.cache.replicas)
    error_message = "cache.node_type is SHARED_CORE_NANO, STANDARD_SMALL, HIGHMEM_MEDIUM or HIGHMEM_XLARGE, and cache.replicas 0 to 5."
  }

  validation {
    condition     = contains(var.known.valkey_versions, var.options.cache.engine_version)
    error_message = "cache.engine_version is one of ${join(", ", var.known.valkey_versions)}."
  }

  validation {
    condition     = var.options.cache.backup_days >= 0 && var.options.cache.backup_days <= 365 && floor(var.options.cache.backup_days) == var.options.cache.backup_days
    error_message = "cache.backup_days is a whole number of days, 365 at most; 0: no backups."
  }

  validation {
    condition = (
      contains(["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"], var.options.cache.maintenance.day)
      && contains(range(24), var.options.cache.maintenance.hour_utc)
    )
    error_message = "cache.maintenance has a day, as SUNDAY, and hour_utc, 0 to 23."
  }

  validation {
    condition     = var.options.cache.from_backup == null ? true : can(regex("^projects/[^/]+/locations/[^/]+/backupCollections/[^/]+/backups/[^/]+$", var.options.cache.from_backup))
    error_message = "cache.from_backup is a backup's whole name: projects/P/locations/R/backupCollections/C/backups/B."
  }

  validation {
    condition     = var.options.delivery.retention_s >= max(600, var.known.longest_deadline_s) && var.options.delivery.retention_s <= 2678400
    error_message = "Pub/Sub keeps messages from 10 minutes to 31 days, and a job is kept as long as somebody may wait for it (deadline.longest_s)."
  }

  validation {
    condition     = var.options.delivery.ack_deadline_s >= 10 && var.options.delivery.ack_deadline_s <= 600
    error_message = "Pub/Sub allows leases of 10 to 600 s (delivery.ack_deadline_s)."
  }

  validation {
    condition     = alltrue([for name in ["ack_deadline_s", "max_delivery_attempts", "retention_s"] : floor(var.options.delivery[name]) == var.options.delivery[name]])
    error_message = "delivery.ack_deadline_s, max_delivery_attempts and retention_s are whole numbers."
  }

  validation {
    condition     = var.options.delivery.max_delivery_attempts >= 5 && var.options.delivery.max_delivery_attempts <= 100
    error_message = "Pub/Sub allows 5 to 100 attempts (delivery.max_delivery_attempts)."
  }

  validation {
    condition     = var.options.delivery.retry_min_s >= 0 && var.options.delivery.retry_min_s <= var.options.delivery.retry_max_s && var.options.delivery.retry_max_s <= 600
    error_message = "delivery.retry_min_s and retry_max_s are 0 to 600 s, the shortest first."
  }

  validation {
    condition     = alltrue([for function in values(var.options.functions) : function == null ? true : can(regex("^[^@ ]+(@sha256:[0-9a-f]+|:[A-Za-z0-9._-]+)$", function.image))])
    error_message = "Images are named with a digest or a tag."
  }

  validation {
    condition     = var.options.functions.reports == null ? true : can(regex("^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}$", var.options.functions.reports.time_zone))
    error_message = "functions.reports.time_zone is an IANA name, as Europe/Berlin."
  }

  validation {
    condition     = var.options.functions.reports == null ? true : can(regex("^[0-9*,/-]+( [0-9A-Za-z*,/-]+){4}$", var.options.functions.reports.schedule))
    error_message = "functions.reports.schedule has the five fields of cron, as \"0 4 * * *\"."
  }

  validation {
    condition     = var.options.inboxes.per_region >= 2 * (var.options.api.max_instances + var.options.batches.instances)
    error_message = "Inboxes are leased one per API instance and runner of batches, by old and new revision: per_region is at least twice api.max_instances and batches.instances together."
  }

  validation {
    condition     = var.options.inboxes.per_region <= var.known.inbox_stride && floor(var.options.inboxes.per_region) == var.options.inboxes.per_region
    error_message = "inboxes.per_region is a whole number, ${var.known.inbox_stride} at most: a region's numbers begin at ${var.known.inbox_stride} times its index."
  }

  validation {
    condition     = var.options.inboxes.slots >= 1 && var.options.inboxes.slots <= 200 && floor(var.options.inboxes.slots) == var.options.inboxes.slots
    error_message = "inboxes.slots is a whole number from 1 to 200."
  }

  validation {
    condition     = var.options.inboxes.kept_slots == null ? true : var.options.inboxes.kept_slots >= var.options.inboxes.slots && var.options.inboxes.kept_slots <= 200 && floor(var.options.inboxes.kept_slots) == var.options.inboxes.kept_slots
    error_message = "inboxes.kept_slots is a whole number from inboxes.slots to 200."
  }

  # Pub/Sub allows a project 10,000 subscriptions; the models need three each.
  validation {
    condition     = var.options.inboxes.per_region * (coalesce(var.options.inboxes.kept_slots, var.options.inboxes.slots) + 1) * length(var.options.regions) <= 9000
    error_message = "Regions x inboxes x (slots + 1) is 9000 at most; fewer slots do as well, requests then share them."
  }

  validation {
    condition     = var.options.invoices.tax_percent == null ? true : var.options.invoices.tax_percent >= 0 && var.options.invoices.tax_percent <= 100
    error_message = "invoices.tax_percent must be between 0 and 100."
  }

  validation {
    condition     = var.options.nodes.overflow == null ? true : contains(keys(var.known.gpu_types), var.options.nodes.overflow)
    error_message = "nodes.overflow is a GPU type of infra/kubernetes/gpus.yaml: ${join(", ", keys(var.known.gpu_types))}."
  }

  validation {
    condition     = var.options.nodes.max_gpus >= 1 && var.options.nodes.max_gpus <= 1000 && floor(var.options.nodes.max_gpus) == var.options.nodes.max_gpus
    error_message = "nodes.max_gpus is a whole number from 1 to 1000, the most nodes of a pool in GKE."
  }

  validation {
    condition = alltrue([
      for count in [var.options.nodes.general.min, var.options.nodes.general.max] : count == null ? true : count >= 1 && count <= 1000 && floor(count) == count
    ]) && try(var.options.nodes.general.min <= var.options.nodes.general.max, true)
    error_message = "nodes.general.min and max are whole numbers from 1 to 1000, the least first."
  }

  validation {
    condition     = var.options.nodes.general.machine_type == null ? true : can(regex("^[a-z][a-z0-9]*-[a-z0-9-]*[a-z0-9]$", var.options.nodes.general.machine_type))
    error_message = "nodes.general.machine_type looks like e2-standard-4."
  }

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE", "EXTENDED"], var.options.nodes.release_channel)
    error_message = "nodes.release_channel is RAPID, REGULAR, STABLE or EXTENDED."
  }

  # Before it, GKE refuses shutdown_grace_period_seconds of spot pools, after the cluster was made.
  validation {
    condition     = can(regex("^1[.][0-9]+[.][0-9]+-gke[.][0-9]+$", var.options.nodes.min_version)) && tonumber(split(".", var.options.nodes.min_version)[1]) >= 35
    error_message = "nodes.min_version is a version of GKE, 1.35.0-gke.1171000 or later: the shutdown of spot nodes needs it."
  }

  validation {
    condition     = alltrue([for days in values(var.options.objects_days) : days >= 1 && floor(days) == days])
    error_message = "objects_days: whole days, at least one, as files promise a day."
  }

  validation {
    condition     = var.options.objects_days.batches >= 31
    error_message = "Files of batches are promised for up to 30 days: objects_days.batches is a day longer at least."
  }

  validation {
    condition     = var.options.objects_days.answers * 86400 >= var.options.api.idempotency_keep_s + 3600
    error_message = "Answers are kept for api.idempotency_keep_s: objects_days.answers is an hour longer at least."
  }

  validation {
    condition     = var.options.objects_days.inputs * 86400 >= var.known.dead_letter_retention_s + var.options.delivery.retention_s
    error_message = "A dead letter can be run again for a week, if its input is still there: objects_days.inputs is longer, by delivery.retention_s."
  }

  # A hit in a cache's last second may be given to a prediction, and to a link that opens for an hour.
  validation {
    condition     = var.options.objects_days.results * 86400 >= var.known.longest_ttl_s + var.known.longest_deadline_s + max(var.options.api.prediction_keep_s, 3600)
    error_message = "A result outlives the longest cache.ttl_s of the catalog and api.prediction_keep_s together: raise objects_days.results."
  }

  validation {
    condition     = alltrue([for name in keys(var.options.outside) : can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", name))])
    error_message = "A name has 3 to 20 lower-case letters, digits or dashes: with the prefix it names an identity pool."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : startswith(cluster.issuer, "https://")])
    error_message = "An issuer is an https URL, as the cluster's tokens have it."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : can(regex("^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$", cluster.namespace))])
    error_message = "A namespace has at most 42 lower-case letters, digits or dashes, so that a subject has at most 127."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : cluster.models == null ? true : length(setsubtract(cluster.models, keys(var.known.models))) == 0])
    error_message = "models are entries of models.yaml."
  }

  validation {
    condition = alltrue([
      for cluster in values(var.options.outside) : cluster.models == null ? true : alltrue([
        for name, model in var.known.models : contains(cluster.models, trimsuffix(name, ".canary"))
        if contains([for chosen in cluster.models : try(var.known.models[chosen].worker, "")], model.worker)
      ])
    ])
    error_message = "Models that share workers (`workers` in models.yaml) run outside together: name all of them or none."
  }

  validation {
    condition = alltrue([
      for cluster in values(var.options.outside) :
      (cluster.redis_url == null) == (cluster.redis_cidr == null) && (cluster.redis_cidr == null ? true : can(cidrhost(cluster.redis_cidr, 0)))
    ])
    error_message = "A Redis of a cluster's own has a URL, and addresses that its workers may connect to."
  }

  validation {
    condition     = alltrue([for cluster in values(var.options.outside) : cluster.redis_url == null ? true : can(regex("^rediss?://[^/]+:6379/[0-9]+$", cluster.redis_url))])
    error_message = "A Redis is named as redis://HOST:6379/0: workers may connect to no other port."
  }

  validation {
    condition     = coalesce(var.options.records.apart, true) || length(var.options.regions) == 1
    error_message = "Regions share their topics, so any of them may take a job: several need one Redis for the records."
  }

  validation {
    condition     = contains(var.known.redis_node_types, var.options.records.node_type) && contains([0, 1, 2, 3, 4, 5], var.options.records.replicas)
    error_message = "records.node_type is SHARED_CORE_NANO, STANDARD_SMALL, HIGHMEM_MEDIUM or HIGHMEM_XLARGE, and records.replicas 0 to 5."
  }

  validation {
    condition     = contains(var.known.valkey_versions, var.options.records.engine_version)
    error_message = "records.engine_version is one of ${join(", ", var.known.valkey_versions)}."
  }

  validation {
    condition     = var.options.records.backup_days >= 0 && var.options.records.backup_days <= 365 && floor(var.options.records.backup_days) == var.options.records.backup_days
    error_message = "records.backup_days is a whole number of days, 365 at most; 0: no backups."
  }

  validation {
    condition = (
      contains(["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"], var.options.records.maintenance.day)
      && contains(range(24), var.options.records.maintenance.hour_utc)
    )
    error_message = "records.maintenance has a day, as SUNDAY, and hour_utc, 0 to 23."
  }

  validation {
    condition     = var.options.records.from_backup == null ? true : can(regex("^projects/[^/]+/locations/[^/]+/backupCollections/[^/]+/backups/[^/]+$", var.options.records.from_backup))
    error_message = "records.from_backup is a backup's whole name: projects/P/locations/R/backupCollections/C/backups/B."
  }

  validation {
    condition     = length(var.options.regions) > 0
    error_message = "At least one region."
  }

  validation {
    condition     = length(distinct(values(var.options.regions)[*].index)) == length(var.options.regions)
    error_message = "Every region needs an index of its own."
  }

  validation {
    condition     = alltrue([for region in var.options.regions : region.index >= 0 && region.index < 16 && floor(region.index) == region.index])
    error_message = "regions.<name>.index is a whole number from 0 to 15."
  }

  validation {
    condition     = length(setsubtract(keys(var.options.regions), var.known.google_regions)) == 0
    error_message = "regions: platform/places.tf knows no ${join(", ", setsubtract(keys(var.options.regions), var.known.google_regions))}."
  }

  validation {
    condition = alltrue([
      for region in var.options.regions : region.max_gpus == null ? true : region.max_gpus >= 1 && region.max_gpus <= 1000 && floor(region.max_gpus) == region.max_gpus
    ])
    error_message = "regions.<name>.max_gpus is a whole number from 1 to 1000, the most nodes of a pool in GKE."
  }

  validation {
    condition = alltrue(flatten([
      for name, region in var.options.regions : region.zones == null ? [true] : concat(
        [length(region.zones) > 0, length(distinct(region.zones)) == length(region.zones)],
        [for zone in region.zones : can(regex("^${name}-[a-z]$", zone))],
      )
    ]))
    error_message = "regions.<name>.zones are zones of that region, as europe-west4-a, one at least and each once."
  }

  validation {
    condition     = alltrue([for region in var.options.regions : region.overflow == null ? true : region.overflow == "none" || contains(keys(var.known.gpu_types), region.overflow)])
    error_message = "regions.<name>.overflow is \"none\", or a GPU type of infra/kubernetes/gpus.yaml: ${join(", ", keys(var.known.gpu_types))}."
  }

  validation {
    condition     = length(var.options.regions) == 0 || anytrue([for region in var.options.regions : !region.drained])
    error_message = "One region at least is not drained."
  }

  # BigQuery allows a table 1,500 load jobs a day, failed ones included, and a backlog needs some too.
  validation {
    condition     = var.options.rows.every_s >= 90 && var.options.rows.every_s <= 3600 && floor(var.options.rows.every_s) == var.options.rows.every_s
    error_message = "rows.every_s is a whole number from 90 to 3600: each pass is a load job, of which BigQuery allows a table 1,500 a day."
  }

  validation {
    condition     = can(regex("^[24]Gi$", var.options.rows.memory))
    error_message = "rows.memory is 2Gi or 4Gi: a pass is in memory, and Cloud Run allows one CPU 4Gi at most."
  }

  # Below 0.931 a total outage does not burn 14.4 times the budget.
  validation {
    condition     = alltrue([for share in [var.options.slos.availability, var.options.slos.deadlines] : 14.4 * (1 - share) < 1 && share < 1])
    error_message = "slos.availability and slos.deadlines lie between 0.931 and 1: below, a total outage would not raise the alarm (14.4 times the budget), and 1 leaves no budget."
  }

  validation {
    condition     = var.options.slos.least_bad_events >= 1 && floor(var.options.slos.least_bad_events) == var.options.slos.least_bad_events
    error_message = "slos.least_bad_events is a whole number, at least 1."
  }

  validation {
    condition     = alltrue([for url in [var.options.traces.endpoint, var.options.traces.workers_endpoint] : url == null ? true : can(regex("^https?://[^ /?#]+$", url))])
    error_message = "An endpoint is a URL without a path, as https://telemetry.googleapis.com."
  }

  validation {
    condition     = var.options.traces.ratio >= 0 && var.options.traces.ratio <= 1
    error_message = "traces.ratio lies between 0 and 1."
  }

  validation {
    condition     = contains(["parentbased_traceidratio", "traceidratio"], var.options.traces.sampler)
    error_message = "traces.sampler is parentbased_traceidratio, or traceidratio to decide for callers that trace too."
  }

  validation {
    condition     = var.options.traces.endpoint != null || var.options.traces.workers_endpoint == null
    error_message = "Spans of workers alone belong to no trace: traces.endpoint is needed too."
  }

  validation {
    condition     = !var.options.weights.hub_token || anytrue([for model in var.known.models : startswith(model.source, "hf:")])
    error_message = "weights.hub_token: no model of models.yaml comes from the hub (source: hf:ORG/NAME), so nobody would read the token."
  }
}
