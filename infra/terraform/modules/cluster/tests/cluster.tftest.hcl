# Against a stand-in of the provider: make terraform-check.

variables {
  project_id     = "example-project"
  prefix         = "penstock"
  region         = "europe-west4"
  network        = "projects/example-project/global/networks/penstock"
  subnetwork     = "projects/example-project/regions/europe-west4/subnetworks/penstock-nodes"
  pods_range     = "pods"
  services_range = "services"
  registry       = { id = "penstock", location = "europe-west4" }

  gpu_types = {
    a100 = {
      accelerator = "nvidia-tesla-a100", machine_type = "a2-highgpu-1g", disk_gb = 100, disk_type = "pd-balanced"
      zones       = { "europe-west4" = ["a", "b"] }
    }
    h100 = {
      accelerator = "nvidia-h100-80gb", machine_type = "a3-highgpu-1g", disk_gb = 200, disk_type = "pd-balanced"
      on_demand   = false
      zones       = { "europe-west4" = ["b", "c"] }
    }
    l4 = {
      accelerator = "nvidia-l4", machine_type = "g2-standard-8", disk_gb = 100, disk_type = "pd-balanced"
      zones       = { "europe-west1" = ["b", "c"], "europe-west4" = ["a", "b", "c"] }
    }
  }
  gpus = {
    "l4-x1" = { type = "l4", share = 1 }
    "l4-x4" = { type = "l4", share = 4 }
  }
}

run "mps_where_the_catalog_says_so" {
  command = plan

  variables {
    gpus = { "l4-x4-mps" = { type = "l4", share = 4, sharing = "mps" } }
  }

  assert {
    condition = alltrue([
      for name in ["l4-x4-mps", "l4-x4-mps-spot"] :
      google_container_node_pool.gpu[name].node_config[0].guest_accelerator[0].gpu_sharing_config[0].gpu_sharing_strategy == "MPS"
    ])
    error_message = "Workers with sharing: mps are on nodes with MPS."
  }
}

run "time_sharing_where_shared" {
  command = plan

  assert {
    condition     = toset(keys(google_container_node_pool.gpu)) == toset(["l4-x1", "l4-x1-spot", "l4-x4", "l4-x4-spot"])
    error_message = "Every class has a pool on demand and a pool of spot nodes."
  }

  assert {
    condition = alltrue([
      for name in ["l4-x4", "l4-x4-spot"] :
      google_container_node_pool.gpu[name].node_config[0].guest_accelerator[0].gpu_sharing_config[0].gpu_sharing_strategy == "TIME_SHARING"
    ])
    error_message = "A share above one is time-sharing."
  }

  assert {
    condition     = google_container_node_pool.gpu["l4-x4"].node_config[0].guest_accelerator[0].gpu_sharing_config[0].max_shared_clients_per_gpu == 4
    error_message = "As many share a GPU as the catalog says."
  }

  assert {
    condition = alltrue([
      for pool in google_container_node_pool.gpu :
      pool.upgrade_settings[0].strategy == "SURGE" && pool.upgrade_settings[0].max_surge == 0 && pool.upgrade_settings[0].max_unavailable == 1
    ])
    error_message = "An upgrade takes no GPU beyond the quota."
  }

  assert {
    condition     = length(google_container_node_pool.gpu["l4-x1"].node_config[0].guest_accelerator[0].gpu_sharing_config) == 0
    error_message = "A GPU of one's own is not shared."
  }
}

run "nodes" {
  command = plan

  assert {
    condition = alltrue([
      for name, pool in google_container_node_pool.gpu :
      pool.node_config[0].spot == endswith(name, "-spot") && pool.autoscaling[0].total_min_node_count == 0
    ])
    error_message = "Spot pools are spot, and every GPU pool goes to zero."
  }

  assert {
    condition = alltrue([
      for pool in google_container_node_pool.gpu :
      pool.node_config[0].gcfs_config[0].enabled && pool.node_config[0].workload_metadata_config[0].mode == "GKE_METADATA"
    ])
    error_message = "Images are streamed; pods have identities of their own, not the node's."
  }

  assert {
    condition     = contains(keys(google_project_iam_member.nodes), "roles/serviceusage.serviceUsageConsumer")
    error_message = "Image streaming needs it, with an account of the nodes' own."
  }

  assert {
    condition     = google_container_cluster.default.workload_identity_config[0].workload_pool == "example-project.svc.id.goog"
    error_message = "The cluster hands out identities of its project."
  }

  assert {
    condition     = google_container_cluster.default.private_cluster_config[0].enable_private_nodes
    error_message = "Nodes have no public addresses."
  }

  assert {
    condition     = google_service_account.nodes.account_id == "penstock-nodes-euwe4"
    error_message = "An account id has at most 30 characters."
  }
}

run "overflow" {
  command = plan

  variables {
    overflow = "a100"
    spot     = false
  }

  assert {
    condition     = toset(keys(google_container_node_pool.gpu)) == toset(["l4-x1", "l4-x1-on-a100", "l4-x4", "l4-x4-on-a100"])
    error_message = "Every class can go on on the larger GPU; without spot there is no spot."
  }

  assert {
    condition = google_container_node_pool.gpu["l4-x4-on-a100"].node_config[0].machine_type == "a2-highgpu-1g" && (
      google_container_node_pool.gpu["l4-x4-on-a100"].node_config[0].labels["penstock.dev/gpu"] == "l4-x4"
    )
    error_message = "Workers find the overflow by the label of their own class."
  }
}

run "zones_that_have_the_gpu" {
  command = plan

  variables {
    overflow = "a100"
  }

  assert {
    condition = google_container_node_pool.gpu["l4-x1"].node_locations == toset(["europe-west4-a", "europe-west4-b", "europe-west4-c"]) && (
      google_container_node_pool.gpu["l4-x1-on-a100"].node_locations == toset(["europe-west4-a", "europe-west4-b"])
    )
    error_message = "A pool is in the zones that have its GPU."
  }
}

run "zones_that_are_chosen" {
  command = plan

  variables {
    zones = ["europe-west4-b", "europe-west4-c"]
    gpus  = { "h100-x1" = { type = "h100", share = 1 }, "l4-x1" = { type = "l4", share = 1 } }
  }

  assert {
    condition     = google_container_node_pool.gpu["l4-x1"].node_locations == toset(["europe-west4-b", "europe-west4-c"])
    error_message = "Of the zones that have the GPU, those that are chosen."
  }

  assert {
    condition = toset(keys(google_container_node_pool.gpu)) == toset(["h100-x1-spot", "l4-x1", "l4-x1-spot"]) && (
      google_container_node_pool.gpu["h100-x1-spot"].node_config[0].disk_size_gb == 200
    )
    error_message = "What is not sold on demand has no pool on demand; each type has the disk of its own."
  }
}

run "no_zone_has_the_gpu" {
  command = plan

  variables {
    region     = "europe-west1"
    overflow   = "a100"
    zones      = null
    subnetwork = "projects/example-project/regions/europe-west1/subnetworks/penstock-nodes"
  }

  expect_failures = [var.overflow]
}

run "no_chosen_zone_has_the_gpu" {
  command = plan

  variables {
    zones = ["europe-west4-a"]
    gpus  = { "h100-x1" = { type = "h100", share = 1 } }
  }

  expect_failures = [var.gpus]
}

run "unknown_gpu" {
  command = plan

  variables {
    gpus = { "h200-x1" = { type = "h200", share = 1 } }
  }

  expect_failures = [var.gpus]
}

run "nothing_to_make_nodes_of" {
  command = plan

  variables {
    gpus = { "h100-x1" = { type = "h100", share = 1 } }
    spot = false
  }

  expect_failures = [var.gpus]
}

run "what_is_reserved" {
  command = plan

  variables {
    gpus         = { "l4-x4" = { type = "l4", share = 4 } }
    reservations = { l4 = { name = "serving", zone = "europe-west4-c", project = "shared-project" } }
  }

  assert {
    condition     = toset(keys(google_container_node_pool.gpu)) == toset(["l4-x4", "l4-x4-reserved", "l4-x4-spot"])
    error_message = "A reservation is a pool more."
  }

  assert {
    condition = (
      google_container_node_pool.gpu["l4-x4-reserved"].node_locations == toset(["europe-west4-c"]) &&
      google_container_node_pool.gpu["l4-x4-reserved"].node_config[0].reservation_affinity[0].consume_reservation_type == "SPECIFIC_RESERVATION" &&
      google_container_node_pool.gpu["l4-x4-reserved"].node_config[0].reservation_affinity[0].values == toset(["projects/shared-project/reservations/serving"]) &&
      google_container_node_pool.gpu["l4-x4-reserved"].node_config[0].labels["penstock.dev/gpu"] == "l4-x4" &&
      google_container_node_pool.gpu["l4-x4-reserved"].node_config[0].labels["penstock.dev/reserved"] == "true"
    )
    error_message = "It is where the reservation is, names it, and workers of the class find it."
  }
}

run "reserved_in_a_zone_without_the_gpu" {
  command = plan

  variables {
    reservations = { a100 = { name = "serving", zone = "europe-west4-c" } }
  }

  expect_failures = [var.reservations]
}

run "flex_start" {
  command = plan

  variables {
    gpus     = { "h100-x1-flex" = { type = "h100", share = 1, provisioning = "flex-start" } }
    overflow = "a100"
    spot     = false
  }

  assert {
    condition     = keys(google_container_node_pool.gpu) == ["h100-x1-flex"]
    error_message = "Who waits for capacity has neither spot nor overflow."
  }

  assert {
    condition = (
      google_container_node_pool.gpu["h100-x1-flex"].node_config[0].flex_start &&
      !google_container_node_pool.gpu["h100-x1-flex"].node_config[0].spot &&
      !google_container_node_pool.gpu["h100-x1-flex"].management[0].auto_repair &&
      google_container_node_pool.gpu["h100-x1-flex"].node_config[0].reservation_affinity[0].consume_reservation_type == "NO_RESERVATION"
    )
    error_message = "As GKE wants flex-start nodes: from no reservation, not repaired."
  }
}

run "spot_nodes_end_in_parts" {
  command = plan

  assert {
    condition = (
      google_container_node_pool.gpu["l4-x1-spot"].node_config[0].kubelet_config[0].shutdown_grace_period_seconds == 30 &&
      google_container_node_pool.gpu["l4-x1-spot"].node_config[0].kubelet_config[0].shutdown_grace_period_critical_pods_seconds == 5
    )
    error_message = "The workers' part of a spot node's last 30 s is said, not left to GKE."
  }
}

run "preloaded" {
  command = plan

  variables {
    preloaded_images = { containers = "global/images/workers" }
  }

  assert {
    condition = {
      for disk in google_container_node_pool.gpu["l4-x1"].node_config[0].secondary_boot_disks : disk.disk_image => disk.mode
    } == { "global/images/workers" = "CONTAINER_IMAGE_CACHE" }
    error_message = "A disk holds the image."
  }
}

run "nothing_mounts_a_disk_of_weights" {
  command = plan

  variables {
    preloaded_images = { weights = "global/images/weights" }
  }

  expect_failures = [var.preloaded_images]
}

run "token_of_the_hub" {
  command = plan

  variables {
    hub_token = true
  }

  assert {
    condition     = google_container_cluster.default.secret_manager_config[0].enabled
    error_message = "The add-on mounts it."
  }
}

run "compute_classes" {
  command = plan

  variables {
    compute_classes = true
  }

  assert {
    condition     = length(google_container_node_pool.gpu) == 0 && google_container_cluster.default.cluster_autoscaling[0].enabled
    error_message = "With ComputeClasses GKE makes the pools itself."
  }
}
