output "name" {
  description = "The cluster's name; known once its pools stand."
  value       = google_container_cluster.default.name
  depends_on  = [google_container_node_pool.general, google_container_node_pool.gpu]
}

output "workload_pool" {
  description = "Identity pool of the Kubernetes service accounts; the project's first cluster makes it."
  value       = google_container_cluster.default.workload_identity_config[0].workload_pool
}
