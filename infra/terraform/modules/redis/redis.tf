# One Memorystore for Valkey that API, workers and functions speak to as
# Redis, from any region of its network.

resource "google_memorystore_instance" "default" {
  project                     = var.project_id
  location                    = var.region
  instance_id                 = var.name
  labels                      = var.labels
  engine_version              = var.size.engine_version
  mode                        = "CLUSTER_DISABLED"
  shard_count                 = 1
  replica_count               = var.size.replicas
  node_type                   = var.size.node_type
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

  # AOF is gone with the instance, and repeats a FLUSHALL. A backup of each day is not.
  dynamic "automated_backup_config" {
    for_each = var.size.backup_days == 0 ? [] : [var.size.backup_days]

    content {
      retention = "${automated_backup_config.value * 86400}s"

      fixed_frequency_schedule {
        start_time {
          hours = 1
        }
      }
    }
  }

  maintenance_policy {
    weekly_maintenance_window {
      day = var.size.maintenance.day

      start_time {
        hours = var.size.maintenance.hour_utc
      }
    }
  }

  # A new instance begins with what a backup has.
  dynamic "managed_backup_source" {
    for_each = var.size.from_backup == null ? [] : [var.size.from_backup]

    content {
      backup = managed_backup_source.value
    }
  }

  persistence_config {
    mode = "AOF"

    aof_config {
      append_fsync = "EVERY_SEC"
    }
  }
}

locals {
  # There is an endpoint for the replicas too, which takes no writes.
  _connections = flatten(google_memorystore_instance.default.endpoints[*].connections[*].psc_auto_connection)
  _primary     = [for connection in local._connections : connection if connection.connection_type == "CONNECTION_TYPE_PRIMARY"]
}
