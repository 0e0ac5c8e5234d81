# Terraform drops attributes that are not in an object's type, so a misspelled
# option would have no effect and no error. The stage therefore takes objects of
# any type. Here they get types and defaults, and other attributes are rejected.

locals {
  # The names of all options, such as nodes.general.max: those in the type, and
  # those that were given.
  _names = { for source, variables in { given = var.given, typed = var.options } : source => {
    for name, value in variables : name => flatten([
      for a, in_a in try({ for key in keys(value) : key => value[key] }, {}) : concat(["${name}.${a}"], flatten([
        for b, in_b in try({ for key in keys(in_a) : key => in_a[key] }, {}) : concat(["${name}.${a}.${b}"], [
          for c in try(keys(in_b), []) : "${name}.${a}.${b}.${c}"
        ])
      ]))
    ])
  } }
  unknown = { for name, given in local._names.given : name => sort(setsubtract(given, try(local._names.typed[name], []))) }
}
