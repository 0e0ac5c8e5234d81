# A regional GKE cluster for the workers: private nodes, identities instead
# of keys, images streamed, metrics collected by Google.

resource "google_container_cluster" "default" {
  # checkov:skip=CKV_GCP_12: Dataplane V2 enforces network policies by itself
  # checkov:skip=CKV_GCP_20: there is no IP endpoint to authorize networks for, only the DNS one, which IAM guards
  # checkov:skip=CKV_GCP_21: labels are the caller's to give
  # checkov:skip=CKV_GCP_65: rights in the cluster come from IAM; groups need a domain that not every project has
  # checkov:skip=CKV_GCP_66: a variable, as its policy has to exist first
  # checkov:skip=CKV_GCP_69: every pool sets GKE_METADATA; the default pool is removed

  project             = var.project_id
  location            = var.region
  name                = "${var.prefix}-${var.region}"
  resource_labels     = var.labels
  deletion_protection = var.deletion_protection
  network             = var.network
  subnetwork          = var.subnetwork
  node_locations      = var.zones
  networking_mode     = "VPC_NATIVE"
  min_master_version  = var.min_version
  datapath_provider   = "ADVANCED_DATAPATH"

  enable_shielded_nodes       = true
  enable_intranode_visibility = true
  remove_default_node_pool    = true
  initial_node_count          = 1

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = true
    }
  }

  binary_authorization {
    evaluation_mode = var.binary_authorization ? "PROJECT_SINGLETON_POLICY_ENFORCE" : "DISABLED"
  }

  # Node pools are ours; what a ComputeClass asks for is made on demand.
  cluster_autoscaling {
    enabled             = var.compute_classes
    autoscaling_profile = "OPTIMIZE_UTILIZATION"

    dynamic "resource_limits" {
      for_each = var.compute_classes ? local.auto_limits : {}

      content {
        resource_type = resource_limits.key
        maximum       = resource_limits.value
      }
    }

    dynamic "auto_provisioning_defaults" {
      for_each = var.compute_classes ? [""] : []

      content {
        service_account = google_service_account.nodes.email
        oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]

        management {
          auto_repair  = true
          auto_upgrade = true
        }

        shielded_instance_config {
          enable_integrity_monitoring = true
          enable_secure_boot          = true
        }
      }
    }
  }

  control_plane_endpoints_config {
    dns_endpoint_config {
      allow_external_traffic = true
    }

    ip_endpoints_config {
      enabled = false
    }
  }

  cost_management_config {
    enabled = true
  }

  dns_config {
    cluster_dns       = "CLOUD_DNS"
    cluster_dns_scope = "CLUSTER_SCOPE"
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = var.pods_range
    services_secondary_range_name = var.services_range
  }

  logging_config {
    enable_components = ["SYSTEM_COMPONENTS", "WORKLOADS"]
  }

  maintenance_policy {
    recurring_window {
      start_time = "2026-01-03T02:00:00Z"
      end_time   = "2026-01-03T08:00:00Z"
      recurrence = "FREQ=WEEKLY;BYDAY=SA,SU"
    }
  }

  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS", "DCGM", "POD", "DEPLOYMENT", "HPA"]

    managed_prometheus {
      enabled = true
    }
  }

  node_pool_defaults {
    node_config_defaults {
      insecure_kubelet_readonly_port_enabled = "FALSE"

      gcfs_config {
        enabled = true
      }
    }
  }

  # The default pool stands only until it is removed. It still must not need
  # the project's default account, which many organizations disable, nor a
  # disk of 100 GB in each zone.
  node_config {
    disk_size_gb    = 20
    disk_type       = "pd-standard"
    machine_type    = "e2-medium"
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    service_account = google_service_account.nodes.email

    shielded_instance_config {
      enable_integrity_monitoring = true
      enable_secure_boot          = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  private_cluster_config {
    enable_private_nodes = true
  }

  release_channel {
    channel = var.release_channel
  }

  # Mounts secrets into pods that may read them.
  secret_manager_config {
    enabled = var.hub_token
  }

  security_posture_config {
    mode               = "BASIC"
    vulnerability_mode = "VULNERABILITY_DISABLED"
  }

  workload_identity_config {
    workload_pool = "${var.project_id}.svc.id.goog"
  }

  lifecycle {
    ignore_changes = [initial_node_count, node_config]
  }
}

resource "google_service_account" "nodes" {
  project      = var.project_id
  account_id   = "${var.prefix}-nodes-${local.short_region}"
  display_name = "Nodes of ${var.prefix} in ${var.region}"
}

# What the node's own agents need; pods have identities of their own. Image
# streaming is billed to the project, which takes the right to use its APIs.
resource "google_project_iam_member" "nodes" {
  for_each = toset(["roles/container.defaultNodeServiceAccount", "roles/serviceusage.serviceUsageConsumer"])

  project = var.project_id
  role    = each.key
  member  = google_service_account.nodes.member
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  project    = var.project_id
  location   = var.registry.location
  repository = var.registry.id
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}

locals {
  # An account id has 30 characters; europe-west4 becomes euwe4. Two letters
  # of each word tell all regions apart but asia-south1 and asia-southeast1.
  short_region = join("", [
    for part in regexall("[a-z]+[0-9]*", replace(var.region, "southeast", "se")) : format("%.2s%s", part, try(regex("[0-9]+$", part), ""))
  ])
}
