# A job travels jobs.<model> -> jobs.<model>.workers, or jobs.<model>.batch
# where its caller may wait; what no worker could finish goes to
# jobs.<model>.dead. Names and filters are those of shared/broker/transport.py.

resource "google_pubsub_topic" "jobs" {
  # checkov:skip=CKV_GCP_83: messages live for an hour (dead letters a week), under Google's own keys

  project = var.project_id
  name    = "jobs.${var.name}"
  labels  = var.labels

  dynamic "message_storage_policy" {
    for_each = length(var.storage_regions) == 0 ? [] : [""]

    content {
      allowed_persistence_regions = var.storage_regions
    }
  }
}

resource "google_pubsub_topic" "dead" {
  # checkov:skip=CKV_GCP_83: messages live for an hour (dead letters a week), under Google's own keys

  project = var.project_id
  name    = "${google_pubsub_topic.jobs.name}.dead"
  labels  = var.labels

  dynamic "message_storage_policy" {
    for_each = length(var.storage_regions) == 0 ? [] : [""]

    content {
      allowed_persistence_regions = var.storage_regions
    }
  }
}

resource "google_pubsub_subscription" "workers" {
  project                    = var.project_id
  name                       = "${google_pubsub_topic.jobs.name}.workers"
  topic                      = google_pubsub_topic.jobs.id
  labels                     = var.labels
  filter                     = "NOT attributes.lane = \"batch\""
  ack_deadline_seconds       = var.workers.ack_deadline_s
  message_retention_duration = "${var.workers.retention_s}s"

  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead.id
    max_delivery_attempts = var.workers.max_delivery_attempts
  }

  expiration_policy {
    ttl = ""
  }

  # Without it the service waits 10 s before a job of a dead worker runs on.
  retry_policy {
    minimum_backoff = "${var.workers.retry_min_s}s"
    maximum_backoff = "${var.workers.retry_max_s}s"
  }
}

resource "google_pubsub_subscription" "batch" {
  project                    = var.project_id
  name                       = "${google_pubsub_topic.jobs.name}.batch"
  topic                      = google_pubsub_topic.jobs.id
  labels                     = var.labels
  filter                     = "attributes.lane = \"batch\""
  ack_deadline_seconds       = var.workers.ack_deadline_s
  message_retention_duration = "${var.workers.retention_s}s"

  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead.id
    max_delivery_attempts = var.workers.max_delivery_attempts
  }

  expiration_policy {
    ttl = ""
  }

  retry_policy {
    minimum_backoff = "${var.workers.retry_min_s}s"
    maximum_backoff = "${var.workers.retry_max_s}s"
  }
}

resource "google_pubsub_subscription" "keep" {
  project                    = var.project_id
  name                       = "${google_pubsub_topic.dead.name}.keep"
  topic                      = google_pubsub_topic.dead.id
  labels                     = var.labels
  ack_deadline_seconds       = 10
  message_retention_duration = "${var.dead_letter_retention_s}s"

  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_subscription" "push" {
  for_each = var.dead_letter_push == null ? {} : { push = var.dead_letter_push }

  project                    = var.project_id
  name                       = "${google_pubsub_topic.dead.name}.push"
  topic                      = google_pubsub_topic.dead.id
  labels                     = var.labels
  ack_deadline_seconds       = 60
  message_retention_duration = "${var.dead_letter_retention_s}s"

  expiration_policy {
    ttl = ""
  }

  push_config {
    push_endpoint = each.value.url

    oidc_token {
      service_account_email = each.value.invoker_email
      audience              = each.value.audience
    }
  }

  retry_policy {
    minimum_backoff = "1s"
    maximum_backoff = "600s"
  }
}
