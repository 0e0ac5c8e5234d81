# One region with a domain, alerts, a budget, functions, batches and a larger cache;
# workers overflow from L4 to A100.

module "platform" {
  source = "../../platform"

  registry_location        = var.registry_location
  project_id               = var.project_id
  domain                   = var.domain
  keep_messages_in_regions = true
  labels                   = { environment = "production" }

  alerts  = { emails = var.alert_emails }
  api     = { image = lookup(var.images, "api", null), max_instances = 20, min_instances = 2 }
  batches = { instances = 1 }
  budget  = { billing_account = var.billing_account, units_per_month = 20000 }
  cache   = { node_type = "HIGHMEM_MEDIUM", replicas = 1 }
  functions = {
    dead_letters = contains(keys(var.images), "dead_letters") ? { image = var.images["dead_letters"] } : null
    reports      = contains(keys(var.images), "reports") ? { image = var.images["reports"] } : null
    webhooks     = contains(keys(var.images), "webhooks") ? { image = var.images["webhooks"] } : null
  }
  # Requests beyond 8 at a time share the slots of their instance.
  inboxes = { per_region = 42, slots = 8 }
  nodes   = { max_gpus = 160, overflow = "a100", preloaded_images = var.preloaded_images }
  regions = { "europe-west4" = { zones = ["europe-west4-a", "europe-west4-b"] } }
}
