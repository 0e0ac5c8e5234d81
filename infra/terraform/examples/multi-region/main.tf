# Two regions behind one address: each has its own subnets, Redis, API,
# inboxes and cluster; topics, rows, records and buckets are shared.

module "platform" {
  source = "../../platform"

  registry_location = var.registry_location
  project_id        = var.project_id
  domain            = var.domain
  dataset_location  = "EU"
  storage_location  = "EU"
  api               = { image = var.api_image, max_instances = 10 }
  inboxes           = { per_region = 20, slots = 8 }
  nodes             = { max_gpus = 32, overflow = "a100" }

  # A new region gets the next index; those that are there keep theirs.
  regions = {
    "europe-west1" = { index = 1, max_gpus = 8, overflow = "none" } # has no A100
    "europe-west4" = { index = 0 }
  }
}
