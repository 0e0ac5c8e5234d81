# A changed filter replaces a subscription, and its bindings go with it, though
# nothing of theirs has changed: hence `replace_triggered_by` of each.

resource "google_pubsub_topic_iam_member" "api_publishes" {
  project = var.project_id
  topic   = google_pubsub_topic.jobs.name
  role    = "roles/pubsub.publisher"
  member  = var.api_member
}

# Jobs of a canary that the other revision is to do, and those of steps of flows.
resource "google_pubsub_topic_iam_member" "forwards" {
  for_each = var.forwarding_members

  project = var.project_id
  topic   = google_pubsub_topic.jobs.name
  role    = "roles/pubsub.publisher"
  member  = each.value
}

# Of a canary: the workers of the other revision take what is left.
resource "google_pubsub_subscription_iam_member" "drains" {
  for_each = var.draining_members

  project      = var.project_id
  subscription = google_pubsub_subscription.workers.name
  role         = "roles/pubsub.subscriber"
  member       = each.value

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.workers.filter]
  }
}

resource "google_pubsub_subscription_iam_member" "drains_batch" {
  for_each = var.draining_members

  project      = var.project_id
  subscription = google_pubsub_subscription.batch.name
  role         = "roles/pubsub.subscriber"
  member       = each.value

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.batch.filter]
  }
}

resource "google_pubsub_subscription_iam_member" "workers_pull" {
  for_each = var.worker_members

  project      = var.project_id
  subscription = google_pubsub_subscription.workers.name
  role         = "roles/pubsub.subscriber"
  member       = each.value

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.workers.filter]
  }
}

resource "google_pubsub_subscription_iam_member" "workers_pull_batch" {
  for_each = var.worker_members

  project      = var.project_id
  subscription = google_pubsub_subscription.batch.name
  role         = "roles/pubsub.subscriber"
  member       = each.value

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.batch.filter]
  }
}

# A worker that gives a job up says why, which the service itself can't.
resource "google_pubsub_topic_iam_member" "workers_give_up" {
  for_each = var.worker_members

  project = var.project_id
  topic   = google_pubsub_topic.dead.name
  role    = "roles/pubsub.publisher"
  member  = each.value
}

# Pub/Sub itself moves a dead letter: it takes it off the one and puts it on
# the other.
resource "google_pubsub_topic_iam_member" "service_publishes" {
  project = var.project_id
  topic   = google_pubsub_topic.dead.name
  role    = "roles/pubsub.publisher"
  member  = var.pubsub_agent
}

resource "google_pubsub_subscription_iam_member" "service_takes" {
  project      = var.project_id
  subscription = google_pubsub_subscription.workers.name
  role         = "roles/pubsub.subscriber"
  member       = var.pubsub_agent

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.workers.filter]
  }
}

resource "google_pubsub_subscription_iam_member" "service_takes_batch" {
  project      = var.project_id
  subscription = google_pubsub_subscription.batch.name
  role         = "roles/pubsub.subscriber"
  member       = var.pubsub_agent

  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.batch.filter]
  }
}
