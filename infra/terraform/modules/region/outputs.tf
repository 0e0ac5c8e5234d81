output "api" {
  description = "The API's service and environment. uri is null until there is an image."
  value = {
    endpoint_group = one([for group in google_compute_region_network_endpoint_group.api : group.id])
    service        = one([for service in google_cloud_run_v2_service.api : service.name])
    uri            = one([for service in google_cloud_run_v2_service.api : service.uri])
  }
}

output "environment" {
  description = "The API's settings in this region, without secrets."
  value       = merge(local.environment, local.first_inbox, local.public_url)
}

output "network" {
  description = "Subnetworks and address ranges for the API and the cluster in this region."
  value = {
    api_subnetwork = google_compute_subnetwork.api.id
    nodes          = google_compute_subnetwork.nodes.id
    pods_range     = "pods"
    services_range = "services"
  }
}
