variable "concurrency" {
  description = "Maximum concurrent calls per instance."
  type        = number
  default     = 20
  nullable    = false
}

variable "environment" {
  description = "Environment variables of the container."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "image" {
  description = "Container image, by digest."
  type        = string
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "max_instances" {
  description = "Maximum number of instances."
  type        = number
  default     = 10
  nullable    = false
}

variable "models" {
  description = "Secret with the catalog, and its version; null: the function doesn't need the catalog."
  type        = object({ secret = string, version = string })
  default     = null
}

variable "name" {
  description = "Name of the service. The account that calls it has the suffix -push."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,22}[a-z0-9]$", var.name))
    error_message = "name: must have 6 to 24 lowercase letters, digits or hyphens, start with a letter and not end in a hyphen. With -push, it names a service account."
  }
}

variable "network" {
  description = "Network that the function uses to connect to Memorystore."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "pubsub_agent" {
  description = "IAM member of Pub/Sub's service agent; null: no push subscription calls the function."
  type        = string
  default     = null
}

variable "region" {
  description = "Region of the service."
  type        = string
  nullable    = false
}

variable "secrets" {
  description = "Environment variables from secrets, with the version of each."
  type        = map(object({ secret = string, version = string }))
  default     = {}
  nullable    = false
}

variable "service_account" {
  description = "Email of the account that the function runs as."
  type        = string
  nullable    = false
}

variable "subnetwork" {
  description = "The region's subnetwork."
  type        = string
  nullable    = false
}

variable "target" {
  description = "Name of the function in the image's source."
  type        = string
  nullable    = false
}

variable "timeout_s" {
  description = "Maximum duration of a call. Pub/Sub waits for 60 s."
  type        = number
  default     = 60
  nullable    = false
}
