output "name" {
  description = "The cluster's name; known once its pools stand."
  value       = google_container_cluster.default.name
  depends_on  = [google_container_node_pool.general, google_container_node_pool.gpu]
}
