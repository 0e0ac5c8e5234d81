# What releases before had under other addresses: Terraform moves it in the state, and
# deletes nothing. Remove a block when no deployment can come from before it.

# 0.1.0: buckets became a module.
moved {
  from = google_storage_bucket.keys["export"]
  to   = module.keys["export"].google_storage_bucket.default
}

moved {
  from = google_storage_bucket.objects
  to   = module.objects.google_storage_bucket.default
}

moved {
  from = google_storage_bucket.reports["reports"]
  to   = module.reports["reports"].google_storage_bucket.default
}

moved {
  from = google_storage_bucket.rows
  to   = module.rows.google_storage_bucket.default
}

moved {
  from = google_storage_bucket.weights
  to   = module.weights.google_storage_bucket.default
}

moved {
  from = google_storage_bucket_iam_member.keys["export"]
  to   = module.keys["export"].google_storage_bucket_iam_member.default["export"]
}

moved {
  from = google_storage_bucket_iam_member.objects
  to   = module.objects.google_storage_bucket_iam_member.default
}

moved {
  from = google_storage_bucket_iam_member.reports["reports"]
  to   = module.reports["reports"].google_storage_bucket_iam_member.default["reports"]
}

moved {
  from = google_storage_bucket_iam_member.rows_put
  to   = module.rows.google_storage_bucket_iam_member.default
}

moved {
  from = google_storage_bucket_iam_member.weights
  to   = module.weights.google_storage_bucket_iam_member.default
}
