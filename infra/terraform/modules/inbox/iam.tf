# The API too: for readiness an instance sends itself a reply and waits.
resource "google_pubsub_topic_iam_member" "repliers" {
  for_each = var.repliers

  project = var.project_id
  topic   = google_pubsub_topic.default.name
  role    = "roles/pubsub.publisher"
  member  = each.value
}

resource "google_pubsub_topic_iam_member" "direct_repliers" {
  for_each = var.repliers

  project = var.project_id
  topic   = google_pubsub_topic.direct.name
  role    = "roles/pubsub.publisher"
  member  = each.value
}

resource "google_pubsub_subscription_iam_member" "api_pulls_direct" {
  project      = var.project_id
  subscription = google_pubsub_subscription.direct.name
  role         = "roles/pubsub.subscriber"
  member       = var.api_member
}

resource "google_pubsub_subscription_iam_member" "api_pulls" {
  for_each = local.slots

  project      = var.project_id
  subscription = google_pubsub_subscription.slots[each.key].name
  role         = "roles/pubsub.subscriber"
  member       = var.api_member

  # A changed filter replaces the subscription, and its bindings go with it.
  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.slots[each.key].filter]
  }
}
