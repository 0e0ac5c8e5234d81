# Addresses of what is in a region, from `terraform show -json PLAN`: its place, its zone, or the place in its id is
# there. Called with --arg region REGION; docs/how-to/lost-region.md has the lines around it.
def is_there: test("(^|/)" + $region + "(-[a-z])?($|/)");

.resource_changes[]
| select(.mode == "managed")
| select([.change.before // {} | .location?, .region?, .zone?, .id?] | map(strings) | any(is_there))
| .address
