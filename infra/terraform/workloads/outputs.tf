output "namespace" {
  description = "Where the workers run."
  value       = local.namespace
  depends_on  = [helm_release.workers]
}

output "objects" {
  description = "Names of what was applied, by kind."
  value       = local.kinds
}

output "workers" {
  description = "The Deployment of each model's workers."
  value       = { for model, slug in local.workers : model => "worker-${slug}" }
}
