# One reply inbox: a topic with a filtered subscription per slot, and a topic
# with one subscription that no filter drops from. An API instance leases both
# through Redis, so serving takes no admin call.

locals {
  slots = toset([for slot in range(var.slots) : tostring(slot)])
}

resource "google_pubsub_topic" "default" {
  # checkov:skip=CKV_GCP_83: replies live for ten minutes, under Google's own keys

  project = var.project_id
  name    = "inbox.${var.number}"
  labels  = var.labels

  dynamic "message_storage_policy" {
    for_each = length(var.storage_regions) == 0 ? [] : [""]

    content {
      allowed_persistence_regions = var.storage_regions
    }
  }
}

# Each of its replies is billed once: it has one subscription.
resource "google_pubsub_topic" "direct" {
  # checkov:skip=CKV_GCP_83: replies live for ten minutes, under Google's own keys

  project = var.project_id
  name    = "${google_pubsub_topic.default.name}.direct"
  labels  = var.labels

  dynamic "message_storage_policy" {
    for_each = length(var.storage_regions) == 0 ? [] : [""]

    content {
      allowed_persistence_regions = var.storage_regions
    }
  }
}

resource "google_pubsub_subscription" "direct" {
  project                    = var.project_id
  name                       = google_pubsub_topic.direct.name
  topic                      = google_pubsub_topic.direct.id
  labels                     = var.labels
  ack_deadline_seconds       = 10
  message_retention_duration = "600s"

  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_subscription" "slots" {
  for_each = local.slots

  project                    = var.project_id
  name                       = "${google_pubsub_topic.default.name}.slot.${each.key}"
  topic                      = google_pubsub_topic.default.id
  labels                     = var.labels
  ack_deadline_seconds       = 10
  message_retention_duration = "600s"

  # A filter costs a delivery for every other slot: one slot needs none.
  filter = var.slots == 1 ? null : "attributes.slot = \"${each.key}\""

  expiration_policy {
    ttl = ""
  }
}
