# models.yaml is the only place that names a model: here its entries become
# topics, subscriptions and the identity of its workers.

locals {
  models = {
    for entry in yamldecode(file(local.models_file)).models : entry.name => {
      gpu = {
        provisioning = try(entry.gpu.provisioning, "standard")
        share        = try(entry.gpu.share, 1)
        type         = try(entry.gpu.type, "none")
      }
      deadline_s = try(entry.deadline.longest_s, 300)
      slug       = local._slugs[entry.name]
      ttl_s      = try(entry.cache.ttl_s, 86400)
    }
  }
  longest_deadline_s      = max(values(local.models)[*].deadline_s...)
  longest_ttl_s           = max(values(local.models)[*].ttl_s...)
  dead_letter_retention_s = 604800

  models_file = var.models_file == null ? "${path.module}/../../../models.yaml" : var.models_file

  # A name that Kubernetes takes; infra/kubernetes/overlay.py makes the same.
  _plain = {
    for entry in yamldecode(file(local.models_file)).models :
    entry.name => trim(replace(lower(entry.name), "/[^a-z0-9]+/", "-"), "-")
  }
  _slugs = {
    for name, slug in local._plain :
    name => length(slug) <= 40 ? slug : "${trim(substr(slug, 0, 31), "-")}-${substr(sha256(name), 0, 8)}"
  }
}

module "model" {
  source   = "../modules/model"
  for_each = local.models

  project_id      = var.project_id
  name            = each.key
  labels          = merge(var.labels, { model = each.value.slug })
  storage_regions = local.storage_regions
  workers         = var.delivery
  api_member      = google_service_account.api.member
  pubsub_agent    = local.pubsub_agent

  dead_letter_retention_s = local.dead_letter_retention_s

  worker_members = merge(
    { gke = "${local.workload_identity}/subject/ns/${var.namespace}/sa/worker-${each.value.slug}" },
    {
      for name, cluster in var.outside :
      name => "principal://${local.outside_pools[name]}/subject/system:serviceaccount:${cluster.namespace}:worker-${each.value.slug}"
      if cluster.models == null ? true : contains(cluster.models, each.key)
    },
  )

  dead_letter_push = var.functions.dead_letters == null ? null : {
    audience      = module.function["dead-letters"].audience
    invoker_email = module.function["dead-letters"].invoker_email
    url           = module.function["dead-letters"].url
  }

  depends_on = [google_project_service.default, google_project_service_identity.default]
}
