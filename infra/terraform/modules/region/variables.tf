variable "api" {
  description = "The API service. Without an image, it is not created, because the first apply creates the registry that the image is pushed to."
  type = object({
    behind_balancer    = optional(bool, false)
    concurrency        = optional(number, 80)
    cpu                = optional(number, 2)
    idempotency_keep_s = optional(number, 86400)
    image              = optional(string)
    keys_in_redis      = optional(bool, false)
    max_in_flight      = optional(number, 8192)
    max_instances      = optional(number, 4)
    memory             = optional(string, "1Gi")
    metrics_image      = optional(string, "us-docker.pkg.dev/cloud-ops-agents-artifacts/cloud-run-gmp-sidecar/cloud-run-gmp-sidecar:1.8.0")
    min_instances      = optional(number, 1)
    prediction_keep_s  = optional(number, 3600)
    public_url         = optional(string, "")
    service_account    = string
    timeout_s          = optional(number, 360)
  })
  nullable = false

  validation {
    condition     = var.api.min_instances >= 1 && var.api.min_instances <= var.api.max_instances
    error_message = "api.min_instances: must be at least 1, because replies arrive outside of requests, and at most api.max_instances."
  }

  validation {
    condition     = var.api.concurrency >= 1 && var.api.concurrency <= 1000
    error_message = "api.concurrency: must be from 1 to 1000, Cloud Run's limits."
  }

  validation {
    condition     = var.api.timeout_s <= 3600
    error_message = "api.timeout_s: must be at most 3600, Cloud Run's maximum."
  }
}

variable "cidr" {
  description = "The region's address range, at least a /14."
  type        = string
  nullable    = false

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && tonumber(split("/", var.cidr)[1]) <= 14
    error_message = "cidr: must be a block of at least a /14, such as 10.64.0.0/14."
  }
}

variable "dataset" {
  description = "BigQuery dataset for the rows."
  type        = string
  nullable    = false
}

variable "deletion_protection" {
  description = "If true, the service can't be deleted."
  type        = bool
  default     = true
  nullable    = false
}

variable "inboxes" {
  description = "The region's part of the inbox pool: first number, number of inboxes, and slots per inbox."
  type = object({
    count = number
    first = number
    slots = number
  })
  nullable = false
}

variable "invoices" {
  description = "Environment variables for the API that set the seller and tax on invoices. Empty: its defaults."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "network" {
  description = "ID of the network."
  type        = string
  nullable    = false
}

variable "objects_url" {
  description = "Bucket for large inputs and results, as gs://BUCKET."
  type        = string
  nullable    = false
}

variable "prefix" {
  description = "First part of every resource name."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "records_max_bytes" {
  description = "Maximum size, in bytes, of responses stored under an Idempotency-Key in the records Redis. Predictions may use the same amount."
  type        = number
  nullable    = false
}

variable "records_url" {
  description = "Redis for the records."
  type        = string
  nullable    = false
}

variable "redis_url" {
  description = "The region's Redis."
  type        = string
  nullable    = false
}

variable "region" {
  description = "Name of the region."
  type        = string
  nullable    = false
}

variable "rows_url" {
  description = "Bucket that rows are written to, as gs://BUCKET; empty: they go directly to BigQuery."
  type        = string
  default     = ""
  nullable    = false
}

variable "secrets" {
  description = "Secrets that the API reads, with the version of each."
  type = object({
    api_keys = object({ secret = string, version = string })
    links    = object({ secret = string, version = string })
    models   = object({ secret = string, version = string })
    scraping = object({ secret = string, version = string })
    webhooks = object({ secret = string, version = string })
  })
  nullable = false
}

variable "traces" {
  description = "OpenTelemetry variables for the API. Empty: no spans."
  type        = map(string)
  default     = {}
  nullable    = false
}
