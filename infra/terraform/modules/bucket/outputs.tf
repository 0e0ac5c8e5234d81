output "bucket" {
  description = "The bucket's attributes, for tests."
  value       = google_storage_bucket.default
}

output "members" {
  description = "The bucket's grants, known once they are in effect."
  value       = google_storage_bucket_iam_member.default
}

output "name" {
  description = "Name of the bucket."
  value       = google_storage_bucket.default.name
}
