output "bucket" {
  description = "The bucket, for tests."
  value       = google_storage_bucket.default
}

output "members" {
  description = "Who may do what, once they may."
  value       = google_storage_bucket_iam_member.default
}

output "name" {
  description = "Name of the bucket."
  value       = google_storage_bucket.default.name
}
