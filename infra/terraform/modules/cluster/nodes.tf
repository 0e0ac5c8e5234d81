# One pool per GPU type, share, count, sharing and capacity. With a share above one, GKE
# offers the GPU that many times, and each worker keeps to its part of the memory
# (PENSTOCK_MEMORY_FRACTION).

locals {
  auto_limits = merge(
    { cpu = 2000, memory = 8000 },
    { for type in distinct([for gpu in var.gpus : gpu.type]) : var.gpu_types[type].accelerator => 64 },
    var.overflow == null ? {} : { (var.gpu_types[var.overflow].accelerator) = 16 },
  )
  # Flex-start has one pool. Others have what is reserved, on demand and spot.
  _own = merge([
    for key, gpu in var.gpus : gpu.provisioning == "flex-start" ? {
      (key) = merge(gpu, { class = key, how = "flex-start" })
      } : merge(
      contains(keys(var.reservations), gpu.type) ? { "${key}-reserved" = merge(gpu, { class = key, how = "reserved" }) } : {},
      var.gpu_types[gpu.type].on_demand ? { (key) = merge(gpu, { class = key, how = "on-demand" }) } : {},
      var.spot ? { "${key}-spot" = merge(gpu, { class = key, how = "spot" }) } : {},
    )
  ]...)
  # Where one type is out of stock, workers of another run on with the same
  # share of a larger GPU.
  _overflow = {
    for key, gpu in var.gpus : "${key}-on-${var.overflow}" => merge(gpu, { class = key, how = "on-demand", type = var.overflow })
    if var.overflow != null && gpu.type != var.overflow && gpu.provisioning == "standard" && gpu.count == 1
  }
  pools = var.compute_classes ? {} : merge(local._own, local._overflow)
  machines = {
    for key, pool in local.pools : key => pool.count == 1 ? {
      disk_gb = var.gpu_types[pool.type].disk_gb, machine_type = var.gpu_types[pool.type].machine_type
    } : var.gpu_types[pool.type].larger[pool.count]
  }
  reservation_names = {
    for type, reservation in var.reservations : type =>
    reservation.project == null ? reservation.name : "projects/${reservation.project}/reservations/${reservation.name}"
  }
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

  node_locations = each.value.how == "reserved" ? [var.reservations[each.value.type].zone] : local.gpu_zones[each.value.type]

  autoscaling {
    location_policy      = "ANY"
    total_max_node_count = var.max_gpus
    total_min_node_count = 0
  }

  # GKE does not repair flex-start nodes, which end after seven days anyway.
  management {
    auto_repair  = each.value.how != "flex-start"
    auto_upgrade = true
  }

  # By default an upgrade makes a node before it drains one: a GPU more than
  # the quota is sized for. Flex-start nodes live too short to be upgraded.
  dynamic "upgrade_settings" {
    for_each = each.value.how == "flex-start" ? [] : [""]

    content {
      strategy        = "SURGE"
      max_surge       = 0
      max_unavailable = 1
    }
  }

  node_config {
    disk_size_gb    = local.machines[each.key].disk_gb
    disk_type       = var.gpu_types[each.value.type].disk_type
    image_type      = "COS_CONTAINERD"
    flex_start      = each.value.how == "flex-start"
    labels          = merge({ "penstock.dev/gpu" = each.value.class }, each.value.how == "reserved" ? { "penstock.dev/reserved" = "true" } : {})
    machine_type    = local.machines[each.key].machine_type
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = var.labels
    service_account = google_service_account.nodes.email
    spot            = each.value.how == "spot"

    gcfs_config {
      enabled = true
    }

    guest_accelerator {
      type  = var.gpu_types[each.value.type].accelerator
      count = each.value.count

      gpu_driver_installation_config {
        # PyTorch's wheels are built for CUDA 13, which needs driver R580 or
        # later; the default may be older.
        gpu_driver_version = "LATEST"
      }

      dynamic "gpu_sharing_config" {
        for_each = each.value.share > 1 ? [each.value] : []

        content {
          gpu_sharing_strategy       = gpu_sharing_config.value.sharing == "mps" ? "MPS" : "TIME_SHARING"
          max_shared_clients_per_gpu = gpu_sharing_config.value.share
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
      shutdown_grace_period_seconds               = each.value.how == "spot" ? 30 : null
      shutdown_grace_period_critical_pods_seconds = each.value.how == "spot" ? 5 : null
    }

    metadata = { disable-legacy-endpoints = "true" }

    # Other pools take what is reserved for nobody in particular.
    dynamic "reservation_affinity" {
      for_each = contains(["flex-start", "reserved"], each.value.how) ? [each.value] : []

      content {
        consume_reservation_type = reservation_affinity.value.how == "reserved" ? "SPECIFIC_RESERVATION" : "NO_RESERVATION"
        key                      = reservation_affinity.value.how == "reserved" ? "compute.googleapis.com/reservation-name" : null
        values                   = reservation_affinity.value.how == "reserved" ? [local.reservation_names[reservation_affinity.value.type]] : null
      }
    }

    # The image, there before the node asks for it.
    dynamic "secondary_boot_disks" {
      for_each = var.preloaded_images

      content {
        disk_image = secondary_boot_disks.value
        mode       = "CONTAINER_IMAGE_CACHE"
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
