variable "api_image" {
  description = "Image of the API, by digest; null at the first apply, which makes the registry."
  type        = string
  default     = null
}

variable "project_id" {
  description = "Project of everything."
  type        = string
  nullable    = false
}

variable "region" {
  description = "The one region."
  type        = string
  default     = "europe-west4"
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe or us, or a region."
  type        = string
  default     = null
}
