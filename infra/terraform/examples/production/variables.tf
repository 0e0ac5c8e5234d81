variable "alert_emails" {
  description = "Who is told of alerts."
  type        = list(string)
  nullable    = false
}

variable "billing_account" {
  description = "Billing account of the budget."
  type        = string
  nullable    = false
}

variable "domain" {
  description = "Domain of the API."
  type        = string
  nullable    = false
}

variable "images" {
  description = "Images by digest: of the API and of the functions; those left out are not made yet."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.images), ["api", "dead_letters", "reports", "webhooks"])) == 0
    error_message = "Images are those of api, dead_letters, reports and webhooks."
  }
}

variable "preloaded_images" {
  description = "Disk image with the worker image (`containers`)."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "project_id" {
  description = "Project of everything."
  type        = string
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe or us, or a region."
  type        = string
  default     = null
}
