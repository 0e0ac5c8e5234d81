# The way into the cluster: its DNS endpoint, with the caller's own identity.

data "google_client_config" "default" {}

data "google_container_cluster" "default" {
  project  = var.project_id
  location = var.region
  name     = var.cluster
}

provider "helm" {
  kubernetes = {
    host  = "https://${data.google_container_cluster.default.control_plane_endpoints_config[0].dns_endpoint_config[0].endpoint}"
    token = data.google_client_config.default.access_token
  }
}
