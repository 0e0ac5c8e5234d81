# One block of the network, cut into nodes, pods, services and the API's
# egress; the third small one is Redis' (platform/redis.tf).

locals {
  ranges = {
    api      = cidrsubnet(var.cidr, 6, 1)
    nodes    = cidrsubnet(var.cidr, 6, 0)
    pods     = cidrsubnet(var.cidr, 1, 1)
    services = cidrsubnet(var.cidr, 6, 4)
  }
}

resource "google_compute_subnetwork" "nodes" {
  project                  = var.project_id
  region                   = var.region
  name                     = "${var.prefix}-nodes-${var.region}"
  network                  = var.network
  ip_cidr_range            = local.ranges.nodes
  private_ip_google_access = true

  log_config {
    flow_sampling = 0.1
  }

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = local.ranges.pods
  }

  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = local.ranges.services
  }
}

resource "google_compute_subnetwork" "api" {
  project                  = var.project_id
  region                   = var.region
  name                     = "${var.prefix}-api-${var.region}"
  network                  = var.network
  ip_cidr_range            = local.ranges.api
  private_ip_google_access = true

  log_config {
    flow_sampling = 0.1
  }
}

# Nodes have no address of their own; weights from a hub come through here.
resource "google_compute_router" "default" {
  project = var.project_id
  region  = var.region
  name    = "${var.prefix}-${var.region}"
  network = var.network
}

resource "google_compute_router_nat" "default" {
  project                            = var.project_id
  region                             = var.region
  name                               = google_compute_router.default.name
  router                             = google_compute_router.default.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }

  subnetwork {
    name                    = google_compute_subnetwork.nodes.id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }
}
