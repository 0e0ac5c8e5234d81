variable "api_image" {
  description = "API image, by digest; null for the first apply, which creates the registry."
  type        = string
  default     = null
}

variable "project_id" {
  description = "Project in which everything is created."
  type        = string
  nullable    = false
}

variable "region" {
  description = "The deployment's only region."
  type        = string
  default     = "europe-west4"
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe, us, or a region."
  type        = string
  default     = null
}
