# Against a stand-in of the provider: make terraform-check.

variables {
  project_id = "example-project"
  region     = "europe-west4"
  name       = "penstock-records"
  network    = "projects/example-project/global/networks/penstock"
}

run "one_node_that_keeps_what_it_promised" {
  command = plan

  assert {
    condition     = google_memorystore_instance.default.mode == "CLUSTER_DISABLED" && google_memorystore_instance.default.shard_count == 1
    error_message = "Cluster mode is off: our Redis client speaks to one node."
  }

  assert {
    condition     = google_memorystore_instance.default.persistence_config[0].mode == "AOF"
    error_message = "Leases and records outlive a restart of Redis."
  }

  assert {
    condition     = google_memorystore_instance.default.engine_configs["maxmemory-policy"] == "volatile-lru"
    error_message = "A promised prediction, which has no time to live, is never evicted."
  }
}

run "backed_up_each_day_and_maintained_on_sundays" {
  command = plan

  assert {
    condition     = google_memorystore_instance.default.automated_backup_config[0].retention == "604800s" && google_memorystore_instance.default.automated_backup_config[0].fixed_frequency_schedule[0].start_time[0].hours == 1
    error_message = "A day's backup is kept for a week."
  }

  assert {
    condition     = google_memorystore_instance.default.maintenance_policy[0].weekly_maintenance_window[0].day == "SUNDAY" && google_memorystore_instance.default.maintenance_policy[0].weekly_maintenance_window[0].start_time[0].hours == 3
    error_message = "Maintenance has its hour."
  }

  assert {
    condition     = length(google_memorystore_instance.default.managed_backup_source) == 0
    error_message = "It begins empty."
  }
}

run "begins_with_a_backup" {
  command = plan

  variables {
    size = { from_backup = "projects/example-project/locations/europe-west4/backupCollections/c/backups/b", backup_days = 0 }
  }

  assert {
    condition     = google_memorystore_instance.default.managed_backup_source[0].backup == var.size.from_backup && length(google_memorystore_instance.default.automated_backup_config) == 0
    error_message = "What a backup has is there."
  }
}

run "writes_go_to_the_primary" {
  override_resource {
    target = google_memorystore_instance.default
    values = {
      endpoints = [{
        connections = [
          { psc_auto_connection = [{ connection_type = "CONNECTION_TYPE_READER", ip_address = "10.64.32.3", port = 6379, forwarding_rule = "", network = "", project_id = "", psc_connection_id = "", service_attachment = "" }] },
          { psc_auto_connection = [{ connection_type = "CONNECTION_TYPE_PRIMARY", ip_address = "10.64.32.2", port = 6379, forwarding_rule = "", network = "", project_id = "", psc_connection_id = "", service_attachment = "" }] },
        ]
      }]
    }
  }

  assert {
    condition     = output.url == "redis://10.64.32.2:6379/0"
    error_message = "The endpoint of the replicas takes no writes."
  }
}

run "unknown_size" {
  command = plan

  variables {
    size = { node_type = "LARGE" }
  }

  expect_failures = [var.size]
}
