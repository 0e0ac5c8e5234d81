# The pool of reply inboxes: a range of numbers for each region.

locals {
  inboxes = merge([
    for name, region in var.regions : {
      for offset in range(var.inboxes.per_region) : region.index * var.inboxes.per_region + offset => name
    }
  ]...)
}

module "inbox" {
  source   = "../modules/inbox"
  for_each = local.inboxes

  project_id      = var.project_id
  number          = tonumber(each.key)
  slots           = var.inboxes.slots
  labels          = merge(var.labels, { region = each.value })
  storage_regions = local.storage_regions
  api_member      = google_service_account.api.member
  repliers        = local.repliers

  depends_on = [google_project_service.default]
}
