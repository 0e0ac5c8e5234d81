variable "api_member" {
  description = "IAM member that pulls replies."
  type        = string
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "number" {
  description = "The inbox's number in the pool."
  type        = number
  nullable    = false

  validation {
    condition     = var.number >= 0 && floor(var.number) == var.number
    error_message = "number: must be a whole number, at least 0."
  }
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "repliers" {
  description = "IAM members that publish replies, by an arbitrary name."
  type        = map(string)
  nullable    = false
}

variable "slots" {
  description = "Number of filtered subscriptions for the inbox."
  type        = number
  default     = 8
  nullable    = false

  validation {
    condition     = var.slots >= 1 && var.slots <= 200 && floor(var.slots) == var.slots
    error_message = "slots: must be a whole number from 1 to 200."
  }
}

variable "storage_regions" {
  description = "Regions in which Pub/Sub may store replies; empty: anywhere."
  type        = list(string)
  default     = []
  nullable    = false
}
