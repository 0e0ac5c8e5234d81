# Types, defaults and checks of the variables that are objects.

module "options" {
  source = "../modules/options"

  given   = local.given
  options = local.given

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

locals {
  options = module.options.checked
}
