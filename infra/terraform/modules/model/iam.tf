resource "google_pubsub_topic_iam_member" "api_publishes" {
  project = var.project_id
  topic   = google_pubsub_topic.jobs.name
  role    = "roles/pubsub.publisher"
  member  = var.api_member
}

resource "google_pubsub_subscription_iam_member" "workers_pull" {
  for_each = var.worker_members

  project      = var.project_id
  subscription = google_pubsub_subscription.workers.name
  role         = "roles/pubsub.subscriber"
  member       = each.value
}

resource "google_pubsub_subscription_iam_member" "workers_pull_batch" {
  for_each = var.worker_members

  project      = var.project_id
  subscription = google_pubsub_subscription.batch.name
  role         = "roles/pubsub.subscriber"
  member       = each.value
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
}

resource "google_pubsub_subscription_iam_member" "service_takes_batch" {
  project      = var.project_id
  subscription = google_pubsub_subscription.batch.name
  role         = "roles/pubsub.subscriber"
  member       = var.pubsub_agent
}
