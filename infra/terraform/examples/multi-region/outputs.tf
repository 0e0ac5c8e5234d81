output "deployments" {
  description = "Input for rendering the workers' manifests; see infra/kubernetes."
  value       = module.platform.deployments
}

output "platform" {
  description = "Values needed to deploy and to call the API."
  value       = module.platform
}
