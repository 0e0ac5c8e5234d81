variable "alert_emails" {
  description = "Recipients of alerts."
  type        = list(string)
  nullable    = false
}

variable "billing_account" {
  description = "Billing account for the budget."
  type        = string
  nullable    = false
}

variable "domain" {
  description = "Domain of the API."
  type        = string
  nullable    = false
}

variable "images" {
  description = "Images of the API and the functions, by digest. Services without an image are not created yet."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.images), ["api", "dead_letters", "reports", "webhooks"])) == 0
    error_message = "images: keys must be api, dead_letters, reports or webhooks."
  }
}

variable "preloaded_images" {
  description = "Disk image that contains the worker image (`containers`)."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "project_id" {
  description = "Project in which everything is created."
  type        = string
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe, us, or a region."
  type        = string
  default     = null
}
