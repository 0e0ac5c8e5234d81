output "url" {
  description = "Where Redis is found."
  value       = "redis://${local._primary[0].ip_address}:${local._primary[0].port}/0"
}
