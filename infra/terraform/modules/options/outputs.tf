output "checked" {
  description = "The stage's object variables, with types, after the checks."
  value       = var.options

  precondition {
    condition = length(flatten(values(local.unknown))) == 0
    error_message = join("\n", [
      for name, unknown in local.unknown : "no such option: ${join(", ", unknown)}; use one of ${join(", ", local._names.typed[name])}."
      if length(unknown) > 0
    ])
  }
}
