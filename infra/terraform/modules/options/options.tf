# Terraform drops attributes of an object that its type does not know, so a
# misspelled option would have no effect and no error. The stage takes its
# objects as they are; here they get types and defaults, and what is left over
# is refused.

locals {
  _typed = {
    alerts       = var.alerts
    analysts     = var.analysts
    api          = var.api
    armor        = var.armor
    batches      = var.batches
    budget       = var.budget
    cache        = var.cache
    delivery     = var.delivery
    functions    = var.functions
    inboxes      = var.inboxes
    nodes        = var.nodes
    objects_days = var.objects_days
    outside      = var.outside
    records      = var.records
    regions      = var.regions
    rows         = var.rows
    slos         = var.slos
    traces       = var.traces
    weights      = var.weights
  }
  # The names of all options, as nodes.general.max: of those that a type knows,
  # and of those that were given.
  _names = { for source, variables in { given = var.given, typed = local._typed } : source => {
    for name, value in variables : name => flatten([
      for a, in_a in try({ for key in keys(value) : key => value[key] }, {}) : concat(["${name}.${a}"], flatten([
        for b, in_b in try({ for key in keys(in_a) : key => in_a[key] }, {}) : concat(["${name}.${a}.${b}"], [
          for c in try(keys(in_b), []) : "${name}.${a}.${b}.${c}"
        ])
      ]))
    ])
  } }
  options = local._names.typed
  unknown = { for name in keys(local._typed) : name => sort(setsubtract(local._names.given[name], local._names.typed[name])) }
}
