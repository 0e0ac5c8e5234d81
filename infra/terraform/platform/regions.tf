# What stands once per region: subnets, API, cluster. Redis is in redis.tf.

locals {
  gpu_types = yamldecode(file("${path.module}/../../kubernetes/gpus.yaml"))
  gpus = {
    for gpu in distinct([for model in local.models : model.gpu if model.gpu.type != "none"]) :
    "${gpu.type}-x${gpu.share}${gpu.count > 1 ? "-${gpu.count}gpus" : ""}${gpu.sharing == "mps" ? "-mps" : ""}${gpu.provisioning == "flex-start" ? "-flex" : ""}" => gpu
  }
  # The GPU type that takes over in each region; null: none.
  overflow = {
    for name, region in local.options.regions : name => region.overflow == "none" ? null : try(coalesce(region.overflow, local.options.nodes.overflow), null)
  }
  # Things that stand once and have a place: the region of the lowest index.
  home = one([for name, region in local.options.regions : name if region.index == min(values(local.options.regions)[*].index...)])
}

module "region" {
  source   = "../modules/region"
  for_each = local.options.regions

  project_id          = var.project_id
  prefix              = var.prefix
  region              = each.key
  labels              = var.labels
  network             = google_compute_network.default.id
  cidr                = cidrsubnet(var.network_cidr, 4, each.value.index)
  dataset             = google_bigquery_dataset.default.dataset_id
  deletion_protection = var.deletion_protection
  invoices            = local.invoice_settings
  objects_url         = "gs://${module.objects.name}"
  records_max_bytes   = local.records_max_bytes
  records_url         = local.records_url
  redis_url           = module.redis[each.key].url
  rows_url            = local.rows_url
  secrets             = local.secrets
  traces              = merge(local.trace_settings.api, local.trace_sampling)

  api = merge(local.options.api, {
    behind_balancer = var.domain != null
    public_url      = var.domain == null ? "" : "https://${var.domain}"
    service_account = google_service_account.api.email
  })

  inboxes = {
    count = local.options.inboxes.per_region
    first = local.first_inbox[each.key]
    slots = local.options.inboxes.slots
  }

  depends_on = [
    google_project_service.default, google_secret_manager_secret_iam_member.api,
    google_secret_manager_secret_version.api_keys, google_secret_manager_secret_version.webhooks, module.inbox
  ]
}

module "cluster" {
  source   = "../modules/cluster"
  for_each = local.options.regions

  project_id           = var.project_id
  prefix               = var.prefix
  region               = each.key
  zones                = each.value.zones
  labels               = var.labels
  network              = google_compute_network.default.id
  subnetwork           = module.region[each.key].network.nodes
  pods_range           = module.region[each.key].network.pods_range
  services_range       = module.region[each.key].network.services_range
  binary_authorization = local.options.nodes.binary_authorization
  compute_classes      = local.options.nodes.compute_classes
  deletion_protection  = var.deletion_protection
  general_nodes        = local.options.nodes.general
  gpu_types            = local.gpu_types
  gpus                 = local.gpus
  hub_token            = local.options.weights.hub_token
  min_version          = local.options.nodes.min_version
  max_gpus             = coalesce(each.value.max_gpus, local.options.nodes.max_gpus)
  overflow             = local.overflow[each.key]
  preloaded_images     = local.options.nodes.preloaded_images
  release_channel      = local.options.nodes.release_channel
  reservations         = each.value.reservations
  spot                 = local.options.nodes.spot

  registry = {
    id       = google_artifact_registry_repository.default.repository_id
    location = google_artifact_registry_repository.default.location
  }

  depends_on = [google_project_service.default]
}
