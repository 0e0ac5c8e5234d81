output "audience" {
  description = "Audience of the caller's tokens."
  value       = local.audience
}

output "invoker_email" {
  description = "Account that calls the function."
  value       = google_service_account.invoker.email
  depends_on  = [google_cloud_run_v2_service_iam_member.invoker]
}

output "url" {
  description = "URL of the function."
  value       = google_cloud_run_v2_service.default.uri
}
