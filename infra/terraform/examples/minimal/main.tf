# One region, no domain, few slots: enough to serve the catalog and to be
# deleted again.

module "platform" {
  source = "../../platform"

  registry_location   = var.registry_location
  project_id          = var.project_id
  deletion_protection = false
  api                 = { image = var.api_image, max_instances = 1 }
  cache               = { node_type = "SHARED_CORE_NANO", replicas = 0 }
  inboxes             = { per_region = 2, slots = 4 }
  nodes               = { max_gpus = 1 }
  regions             = { (var.region) = {} }
}
