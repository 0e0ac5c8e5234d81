# Redis of each region (the second level of the cache, and the leases of the
# inboxes) and of the records: who answered what, and what Idempotency-Keys
# were answered. Topics are those of all regions, so records are too: regions
# that share topics share one Redis for them (docs/decisions/0012).

locals {
  _records_apart = coalesce(local.options.records.apart, length(local.options.regions) > 1)
  # Subnet 2 of a region's block; modules/region has the others.
  redis_cidrs      = { for name, region in local.options.regions : name => cidrsubnet(cidrsubnet(var.network_cidr, 4, region.index), 6, 2) }
  redis_node_types = keys(local._writable_mb)
  records_url      = local._records_apart ? module.records["records"].url : module.redis[local.home].url

  # What a node takes before it evicts, by its type.
  _writable_mb = { SHARED_CORE_NANO = 1120, STANDARD_SMALL = 5200, HIGHMEM_MEDIUM = 10400, HIGHMEM_XLARGE = 46400 }
  # For answers, and as much for predictions, which may take twice theirs
  # while many tenants have some under way. The last quarter is the cache's.
  records_max_bytes = floor(local._writable_mb[local._records_apart ? local.options.records.node_type : local.options.cache.node_type] * 1000 * 1000 / 4)
}

resource "google_compute_subnetwork" "redis" {
  for_each = local.redis_cidrs

  project                  = var.project_id
  region                   = each.key
  name                     = "${var.prefix}-cache-${each.key}"
  network                  = google_compute_network.default.id
  ip_cidr_range            = each.value
  private_ip_google_access = true

  log_config {
    flow_sampling = 0.1
  }
}

# One for each region and network, whatever stands there.
resource "google_network_connectivity_service_connection_policy" "default" {
  for_each = google_compute_subnetwork.redis

  project       = var.project_id
  location      = each.key
  name          = "${var.prefix}-cache-${each.key}"
  service_class = "gcp-memorystore"
  network       = google_compute_network.default.id

  psc_config {
    subnetworks = [each.value.id]
  }

  depends_on = [google_project_iam_member.network_agent]
}

module "redis" {
  source   = "../modules/redis"
  for_each = local.options.regions

  project_id          = var.project_id
  region              = each.key
  name                = "${var.prefix}-${each.key}"
  labels              = var.labels
  network             = google_network_connectivity_service_connection_policy.default[each.key].network
  size                = local.options.cache
  deletion_protection = var.deletion_protection
}

module "records" {
  source   = "../modules/redis"
  for_each = local._records_apart ? { records = local.options.records } : {}

  project_id          = var.project_id
  region              = local.home
  name                = "${var.prefix}-records"
  labels              = var.labels
  network             = google_network_connectivity_service_connection_policy.default[local.home].network
  size                = each.value
  deletion_protection = var.deletion_protection
}
