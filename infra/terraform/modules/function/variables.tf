variable "concurrency" {
  description = "Calls that one instance handles at a time."
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
  description = "Labels of every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "max_instances" {
  description = "Most instances at a time."
  type        = number
  default     = 10
  nullable    = false
}

variable "models" {
  description = "Secret with the catalog, and which version of it; null: the function needs none."
  type        = object({ secret = string, version = string })
  default     = null
}

variable "name" {
  description = "Name of the service, and of the account that calls it with -push behind."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,22}[a-z0-9]$", var.name))
    error_message = "A name has 6 to 24 lower-case letters, digits or dashes: with -push it names a service account."
  }
}

variable "network" {
  description = "Network to reach Memorystore through."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "pubsub_agent" {
  description = "IAM member of Pub/Sub's own service agent; null: no push calls the function."
  type        = string
  default     = null
}

variable "region" {
  description = "Region of the service."
  type        = string
  nullable    = false
}

variable "secrets" {
  description = "Environment variables that are secrets, and which version of each."
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
  description = "Subnetwork of the region."
  type        = string
  nullable    = false
}

variable "target" {
  description = "Name of the function in the image's source."
  type        = string
  nullable    = false
}

variable "timeout_s" {
  description = "Longest that one call may take; Pub/Sub waits for 60 s."
  type        = number
  default     = 60
  nullable    = false
}
