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
    a100 = { accelerator = "nvidia-tesla-a100", machine_type = "a2-highgpu-1g" }
    l4   = { accelerator = "nvidia-l4", machine_type = "g2-standard-8" }
  }
  gpus = {
    "l4-x1" = { type = "l4", share = 1 }
    "l4-x4" = { type = "l4", share = 4 }
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

run "preloaded" {
  command = plan

  variables {
    preloaded_images = { containers = "global/images/workers", weights = "global/images/weights" }
  }

  assert {
    condition = {
      for disk in google_container_node_pool.gpu["l4-x1"].node_config[0].secondary_boot_disks :
      disk.disk_image => disk.mode == "CONTAINER_IMAGE_CACHE"
    } == { "global/images/weights" = false, "global/images/workers" = true }
    error_message = "One disk holds the image, another the weights."
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
