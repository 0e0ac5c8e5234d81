# Variables that are objects, with types and defaults: see modules/options.

module "options" {
  source = "../modules/options"

  alerts       = var.alerts
  analysts     = var.analysts
  api          = var.api
  armor        = var.armor
  batches      = var.batches
  budget       = var.budget
  cache        = var.cache
  delivery     = var.delivery
  functions    = var.functions
  inboxes      = var.inboxes
  nodes        = var.nodes
  objects_days = var.objects_days
  outside      = var.outside
  records      = var.records
  regions      = var.regions
  rows         = var.rows
  slos         = var.slos
  traces       = var.traces
  weights      = var.weights

  given = {
    alerts       = var.alerts
    analysts     = var.analysts
    api          = var.api
    armor        = var.armor
    batches      = var.batches
    budget       = var.budget
    cache        = var.cache
    delivery     = var.delivery
    functions    = var.functions
    inboxes      = var.inboxes
    nodes        = var.nodes
    objects_days = var.objects_days
    outside      = var.outside
    records      = var.records
    regions      = var.regions
    rows         = var.rows
    slos         = var.slos
    traces       = var.traces
    weights      = var.weights
  }

  known = {
    api_memory_mib          = local.api_memory_mib
    dead_letter_retention_s = local.dead_letter_retention_s
    google_regions          = local.google_regions
    gpu_types               = local.gpu_types
    inbox_stride            = local.inbox_stride
    longest_deadline_s      = local.longest_deadline_s
    longest_ttl_s           = local.longest_ttl_s
    models                  = local.models
    redis_node_types        = local.redis_node_types
    valkey_versions         = local.valkey_versions
  }
}
