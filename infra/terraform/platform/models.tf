# models.yaml is the only place that names a model: here its entries become
# topics, subscriptions and the identity of its workers.

locals {
  models = {
    for entry in yamldecode(file(local.models_file)).models : entry.name => {
      gpu  = { share = try(entry.gpu.share, 1), type = try(entry.gpu.type, "none") }
      slug = local._slugs[entry.name]
    }
  }
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
  worker_member   = "${local.workload_identity}/subject/ns/${var.namespace}/sa/worker-${each.value.slug}"

  dead_letter_push = var.functions.dead_letters == null ? null : {
    audience      = module.function["dead-letters"].audience
    invoker_email = module.function["dead-letters"].invoker_email
    url           = module.function["dead-letters"].url
  }

  depends_on = [google_project_service.default]
}
