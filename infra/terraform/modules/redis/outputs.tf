output "url" {
  description = "URL of the Redis instance."
  value       = "redis://${local._primary[0].ip_address}:${local._primary[0].port}/0"
}
