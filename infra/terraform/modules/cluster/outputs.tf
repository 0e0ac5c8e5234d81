output "name" {
  description = "Name of the cluster, known once its pools exist."
  value       = google_container_cluster.default.name
  depends_on  = [google_container_node_pool.general, google_container_node_pool.gpu]
}

output "workload_pool" {
  description = "Identity pool of the Kubernetes service accounts. The project's first cluster creates it."
  value       = google_container_cluster.default.workload_identity_config[0].workload_pool
}
