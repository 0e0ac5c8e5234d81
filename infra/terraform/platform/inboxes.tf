# The pool of reply inboxes: a range of numbers for each region.

locals {
  inboxes = merge([
    for name, region in local.options.regions : {
      for offset in range(local.options.inboxes.per_region) : local.first_inbox[name] + offset => name
    }
  ]...)
  # The distance is a constant: with per_region as distance, a raise would
  # give the inboxes of all regions but the first new numbers, and with them
  # new topics, while instances wait for replies on the old ones.
  first_inbox  = { for name, region in local.options.regions : name => region.index * local.inbox_stride }
  inbox_stride = 1000
  made_slots   = coalesce(local.options.inboxes.kept_slots, local.options.inboxes.slots)
}

module "inbox" {
  source   = "../modules/inbox"
  for_each = local.inboxes

  project_id      = var.project_id
  number          = tonumber(each.key)
  slots           = local.made_slots
  labels          = merge(var.labels, { region = each.value })
  storage_regions = local.storage_regions
  api_member      = google_service_account.api.member
  repliers        = local.repliers_before_clusters

  depends_on = [google_project_service.default]
}

# Apart from the inboxes, which the API waits for: the workers' pool waits for
# the clusters, and those stand in the API's network.
resource "google_pubsub_topic_iam_member" "workers_reply" {
  for_each = local.inboxes

  project = var.project_id
  topic   = module.inbox[each.key].topic_id
  role    = "roles/pubsub.publisher"
  member  = local.workers_member
}

resource "google_pubsub_topic_iam_member" "workers_reply_directly" {
  for_each = local.inboxes

  project = var.project_id
  topic   = module.inbox[each.key].direct_topic_id
  role    = "roles/pubsub.publisher"
  member  = local.workers_member
}
