output "deployments" {
  description = "For the workers' manifests, see infra/kubernetes."
  value       = module.platform.deployments
}

output "platform" {
  description = "Everything that deploying and calling takes."
  value       = module.platform
}
