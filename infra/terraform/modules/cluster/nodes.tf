# One pool per GPU type, share and capacity. A share above one is time-sharing:
# GKE then offers the GPU that many times, and each worker keeps to its part
# of the memory (PENSTOCK_MEMORY_FRACTION).

locals {
  auto_limits = merge(
    { cpu = 2000, memory = 8000 },
    { for type in distinct([for gpu in var.gpus : gpu.type]) : var.gpu_types[type].accelerator => 64 },
    var.overflow == null ? {} : { (var.gpu_types[var.overflow].accelerator) = 16 },
  )
  _own = merge([
    for key, gpu in var.gpus : merge(
      var.gpu_types[gpu.type].on_demand ? { (key) = merge(gpu, { class = key, spot = false }) } : {},
      var.spot ? { "${key}-spot" = merge(gpu, { class = key, spot = true }) } : {},
    )
  ]...)
  # Where one type is out of stock, workers of another run on with the same
  # share of a larger GPU.
  _overflow = {
    for key, gpu in var.gpus : "${key}-on-${var.overflow}" => merge(gpu, { class = key, spot = false, type = var.overflow })
    if var.overflow != null && gpu.type != var.overflow
  }
  pools = var.compute_classes ? {} : merge(local._own, local._overflow)
  # Not every zone of a region has every GPU.
  gpu_zones = {
    for name, type in var.gpu_types : name => [
      for letter in lookup(type.zones, var.region, []) : "${var.region}-${letter}"
      if var.zones == null ? true : contains(var.zones, "${var.region}-${letter}")
    ]
  }
}

resource "google_container_node_pool" "gpu" {
  for_each = local.pools

  project  = var.project_id
  location = var.region
  cluster  = google_container_cluster.default.name
  name     = each.key

  node_locations = local.gpu_zones[each.value.type]

  autoscaling {
    location_policy      = "ANY"
    total_max_node_count = var.max_gpus
    total_min_node_count = 0
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    disk_size_gb    = var.gpu_types[each.value.type].disk_gb
    disk_type       = var.gpu_types[each.value.type].disk_type
    image_type      = "COS_CONTAINERD"
    labels          = { "penstock.dev/gpu" = each.value.class }
    machine_type    = var.gpu_types[each.value.type].machine_type
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = var.labels
    service_account = google_service_account.nodes.email
    spot            = each.value.spot

    gcfs_config {
      enabled = true
    }

    guest_accelerator {
      type  = var.gpu_types[each.value.type].accelerator
      count = 1

      gpu_driver_installation_config {
        # PyTorch's wheels are built for CUDA 13, which needs driver R580 or
        # later; the default may be older.
        gpu_driver_version = "LATEST"
      }

      dynamic "gpu_sharing_config" {
        for_each = each.value.share > 1 ? [each.value.share] : []

        content {
          gpu_sharing_strategy       = "TIME_SHARING"
          max_shared_clients_per_gpu = gpu_sharing_config.value
        }
      }
    }

    gvnic {
      enabled = true
    }

    # A spot node has 30 s, of which GKE keeps the last 15 for system pods
    # unless told otherwise. infra/kubernetes/placement.py has the same parts.
    kubelet_config {
      insecure_kubelet_readonly_port_enabled      = "FALSE"
      shutdown_grace_period_seconds               = each.value.spot ? 30 : null
      shutdown_grace_period_critical_pods_seconds = each.value.spot ? 5 : null
    }

    metadata = { disable-legacy-endpoints = "true" }

    # Image and weights that are there before the node asks for them.
    dynamic "secondary_boot_disks" {
      for_each = var.preloaded_images

      content {
        disk_image = secondary_boot_disks.value
        mode       = secondary_boot_disks.key == "containers" ? "CONTAINER_IMAGE_CACHE" : null
      }
    }

    shielded_instance_config {
      enable_integrity_monitoring = true
      enable_secure_boot          = true
    }

    taint {
      key    = "penstock.dev/workers"
      value  = "true"
      effect = "NO_SCHEDULE"
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }

  # A node that may not pull or report yet does not become ready.
  depends_on = [google_artifact_registry_repository_iam_member.nodes, google_project_iam_member.nodes]
}

# KEDA, the collectors, and workers of models that need no GPU.
resource "google_container_node_pool" "general" {
  project  = var.project_id
  location = var.region
  cluster  = google_container_cluster.default.name
  name     = "general"

  autoscaling {
    location_policy      = "BALANCED"
    total_max_node_count = var.general_nodes.max
    total_min_node_count = var.general_nodes.min
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    disk_size_gb    = 50
    disk_type       = "pd-balanced"
    image_type      = "COS_CONTAINERD"
    machine_type    = var.general_nodes.machine_type
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = var.labels
    service_account = google_service_account.nodes.email

    gcfs_config {
      enabled = true
    }

    kubelet_config {
      insecure_kubelet_readonly_port_enabled = "FALSE"
    }

    metadata = { disable-legacy-endpoints = "true" }

    shielded_instance_config {
      enable_integrity_monitoring = true
      enable_secure_boot          = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }

  # A node that may not pull or report yet does not become ready.
  depends_on = [google_artifact_registry_repository_iam_member.nodes, google_project_iam_member.nodes]
}
