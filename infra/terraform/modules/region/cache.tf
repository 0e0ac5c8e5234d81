# The second level of the cache and the leases of the inboxes.

resource "google_network_connectivity_service_connection_policy" "default" {
  project       = var.project_id
  location      = var.region
  name          = "${var.prefix}-cache-${var.region}"
  service_class = "gcp-memorystore"
  network       = var.network

  psc_config {
    subnetworks = [google_compute_subnetwork.cache.id]
  }
}

resource "google_memorystore_instance" "default" {
  project                     = var.project_id
  location                    = var.region
  instance_id                 = "${var.prefix}-${var.region}"
  labels                      = var.labels
  engine_version              = var.cache.engine_version
  mode                        = "CLUSTER_DISABLED"
  shard_count                 = 1
  replica_count               = var.cache.replicas
  node_type                   = var.cache.node_type
  deletion_protection_enabled = var.deletion_protection

  # The one door is an address inside our network, and PENSTOCK_REDIS_URL
  # carries no credentials that are renewed, as IAM_AUTH would need.
  authorization_mode      = "AUTH_DISABLED"
  transit_encryption_mode = "TRANSIT_ENCRYPTION_DISABLED"

  # When memory is short, what was not asked for longest goes first, of what
  # has a time to live: the cache does, a promised prediction does not.
  engine_configs = {
    maxmemory-policy = "volatile-lru"
  }

  desired_auto_created_endpoints {
    network    = var.network
    project_id = var.project_id
  }

  persistence_config {
    mode = "AOF"

    aof_config {
      append_fsync = "EVERY_SEC"
    }
  }

  depends_on = [google_network_connectivity_service_connection_policy.default]
}

locals {
  _endpoint = google_memorystore_instance.default.endpoints[0].connections[0].psc_auto_connection[0]
  redis_url = "redis://${local._endpoint.ip_address}:${local._endpoint.port}/0"
}
