# Who runs batches: the API's image and account, without a port. It stands in
# one region, as nobody waits for it: what comes meanwhile is in the bucket.

resource "google_cloud_run_v2_worker_pool" "batches" {
  for_each = local.options.batches.instances == 0 || local.options.api.image == null ? {} : { batches = local.options.api.image }

  project             = var.project_id
  location            = local.home
  name                = "${var.prefix}-batches"
  labels              = var.labels
  deletion_protection = var.deletion_protection

  scaling {
    scaling_mode          = "MANUAL"
    manual_instance_count = local.options.batches.instances
  }

  template {
    service_account = google_service_account.api.email

    containers {
      name    = "batches"
      image   = each.value
      command = ["penstock"]
      args    = ["batches"]

      dynamic "env" {
        # Where it runs there is nobody to scrape it. Keys in Redis tell it the budgets of now.
        # Without them those at the creation of a batch count, as the file of keys is not mounted.
        for_each = merge(
          {
            for name, value in module.region[local.home].environment : name => value
            if name != "PENSTOCK_KEYS_URL" || local.options.api.keys_in_redis
          },
          { PENSTOCK_METRICS_PORT = "0" },
        )

        content {
          name  = env.key
          value = env.value
        }
      }

      resources {
        limits = { cpu = "1", memory = local.options.batches.memory }
      }

      volume_mounts {
        name       = "models"
        mount_path = "/etc/penstock"
      }
    }

    volumes {
      name = "models"

      secret {
        secret = local.secrets.models.secret

        items {
          path    = "models.yaml"
          version = local.secrets.models.version
        }
      }
    }

    vpc_access {
      egress = "PRIVATE_RANGES_ONLY"

      network_interfaces {
        network    = google_compute_network.default.id
        subnetwork = module.region[local.home].network.api_subnetwork
      }
    }
  }

  lifecycle {
    ignore_changes = [client, client_version]
  }

  depends_on = [google_secret_manager_secret_iam_member.api, google_secret_manager_secret_version.files, module.inbox]
}
