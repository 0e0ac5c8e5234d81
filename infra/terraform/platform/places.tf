# Where things can stand. Names are checked against this list, since a wrong
# one is refused by Google only after minutes of an apply. A region that Google
# has added since (cloud.google.com/about/locations) is added here.

locals {
  locations = concat(["EU", "US"], local.google_regions)
  # Multi-regions of Artifact Registry. Where none is near, the region itself.
  continents = ["asia", "europe", "us"]
  continent = try(
    { asia = "asia", europe = "europe", us = "us" }[split("-", local.home)[0]],
    local.home,
  )
  google_regions = [
    "africa-south1",
    "asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3", "asia-south1", "asia-south2",
    "asia-southeast1", "asia-southeast2", "australia-southeast1", "australia-southeast2",
    "europe-central2", "europe-north1", "europe-north2", "europe-southwest1", "europe-west1", "europe-west10",
    "europe-west12", "europe-west2", "europe-west3", "europe-west4", "europe-west6", "europe-west8", "europe-west9",
    "me-central1", "me-central2", "me-west1",
    "northamerica-northeast1", "northamerica-northeast2", "northamerica-south1",
    "southamerica-east1", "southamerica-west1",
    "us-central1", "us-east1", "us-east4", "us-east5", "us-south1", "us-west1", "us-west2", "us-west3", "us-west4",
  ]

  # Of Cloud Run: least and most memory of an instance, in MiB, by its CPUs
  # (docs.cloud.google.com/run/docs/configuring/services/memory-limits and cpu).
  api_memory_mib = {
    1 = { least = 512, most = 4096 }
    2 = { least = 512, most = 8192 }
    4 = { least = 2048, most = 16384 }
    6 = { least = 4096, most = 24576 }
    8 = { least = 4096, most = 32768 }
  }
  valkey_versions = ["VALKEY_7_2", "VALKEY_8_0", "VALKEY_9_0"]
}
