# Functions, each as soon as its image is given: behind Pub/Sub push one that
# answers the callers of dead letters and one that delivers webhooks, behind
# Cloud Scheduler one that makes reports. They stand in one region: nobody waits
# for them, and what comes meanwhile is kept (dead letters for a week, events
# for a day).

locals {
  _functions = { for name, function in {
    dead-letters = local.options.functions.dead_letters
    reports      = local.options.functions.reports
    webhooks     = local.options.functions.webhooks
  } : name => function if function != null }
  _function_facts = {
    dead-letters = { target = "dead_letter", models = local.secrets.models, secrets = {} }
    reports      = { target = "reports", models = null, secrets = {} }
    webhooks = {
      target = "webhook"
      models = null
      secrets = {
        PENSTOCK_SECRET          = local.secrets.links
        PENSTOCK_WEBHOOK_SECRETS = local.secrets.webhooks
      }
    }
  }
  _function_secrets = merge([for name, function in local._functions : {
    for key in { dead-letters = ["models"], reports = [], webhooks = ["links", "webhooks"] }[name] : "${name} ${key}" => { name = name, key = key }
  }]...)
  # Who ends a job tells the one that waits for it.
  repliers = merge(local.repliers_before_clusters, { workers = local.workers_member })
  repliers_before_clusters = merge(
    { api = google_service_account.api.member },
    { for name, account in google_service_account.functions : name => account.member if name == "dead-letters" },
    { for name, member in local.outside_members : "outside-${name}" => member },
  )
}

module "function" {
  source   = "../modules/function"
  for_each = local._functions

  project_id   = var.project_id
  name         = "${var.prefix}-${each.key}"
  region       = local.home
  image        = each.value.image
  labels       = var.labels
  network      = google_compute_network.default.id
  subnetwork   = module.region[local.home].network.api_subnetwork
  pubsub_agent = each.key == "reports" ? null : local.pubsub_agent
  models       = local._function_facts[each.key].models
  secrets      = local._function_facts[each.key].secrets
  target       = local._function_facts[each.key].target

  # A run of reports takes minutes, and two at once do the same.
  concurrency   = each.key == "reports" ? 4 : null
  max_instances = each.key == "reports" ? 2 : null
  timeout_s     = each.key == "reports" ? 570 : null

  service_account = google_service_account.functions[each.key].email

  environment = merge(local.trace_settings.api, each.key == "reports" ? local.report_settings : { PENSTOCK_ROWS_URL = local.rows_url }, {
    PENSTOCK_DATASET     = google_bigquery_dataset.default.dataset_id
    PENSTOCK_OBJECTS_URL = "gs://${each.key == "reports" ? one(values(module.reports)[*].name) : module.objects.name}"
    PENSTOCK_PROJECT     = var.project_id
    PENSTOCK_RECORDS_URL = local.records_url
    PENSTOCK_REDIS_URL   = module.redis[local.home].url
    PENSTOCK_REGION      = local.home
  })

  depends_on = [
    google_project_service_identity.default, google_secret_manager_secret_iam_member.functions,
    google_secret_manager_secret_version.webhooks
  ]
}

resource "google_service_account" "functions" {
  for_each = local._functions

  project      = var.project_id
  account_id   = "${var.prefix}-${each.key}"
  display_name = "Runs the function ${each.key}"

  depends_on = [google_project_service.default]
}

resource "google_secret_manager_secret_iam_member" "functions" {
  for_each = local._function_secrets

  project   = var.project_id
  secret_id = google_secret_manager_secret.default[each.value.key].secret_id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.functions[each.value.name].member
}

# There whether or not somebody delivers: who ends a prediction publishes to it.
resource "google_pubsub_topic" "webhooks" {
  # checkov:skip=CKV_GCP_83: events live for a day, under Google's own keys

  project = var.project_id
  name    = "webhooks"
  labels  = var.labels

  dynamic "message_storage_policy" {
    for_each = length(local.storage_regions) == 0 ? [] : [""]

    content {
      allowed_persistence_regions = local.storage_regions
    }
  }

  depends_on = [google_project_service.default]
}

resource "google_pubsub_subscription" "webhooks" {
  for_each = local.options.functions.webhooks == null ? {} : { webhooks = local.options.functions.webhooks }

  project                    = var.project_id
  name                       = "${google_pubsub_topic.webhooks.name}.push"
  topic                      = google_pubsub_topic.webhooks.id
  labels                     = var.labels
  ack_deadline_seconds       = 60
  message_retention_duration = "86400s"

  expiration_policy {
    ttl = ""
  }

  push_config {
    push_endpoint = module.function[each.key].url

    oidc_token {
      service_account_email = module.function[each.key].invoker_email
      audience              = module.function[each.key].audience
    }
  }

  retry_policy {
    minimum_backoff = "5s"
    maximum_backoff = "600s"
  }
}

resource "google_pubsub_topic_iam_member" "webhooks" {
  for_each = local.repliers

  project = var.project_id
  topic   = google_pubsub_topic.webhooks.name
  role    = "roles/pubsub.publisher"
  member  = each.value
}
