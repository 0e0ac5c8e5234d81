#!/usr/bin/env bash
# Known faults in the images, of Debian's packages and of Python's. Stops the release at those of SEVERITIES (CRITICAL,
# or CRITICAL|HIGH) for which there is a fix: one without can't be mended by waiting.
set -euo pipefail
bad=0
for image in api functions worker; do
  scan=$(gcloud artifacts docker images scan "$(cat "release/$image.image")" --remote --location "$LOCATION" \
    --format 'value(response.scan)')
  [ -n "$scan" ] || { echo "$image: no scan came back" >&2; exit 1; }
  gcloud artifacts docker images list-vulnerabilities "$scan" --location "$LOCATION" \
    --format 'csv[no-heading,separator="|"](vulnerability.fixAvailable,vulnerability.effectiveSeverity,noteName)' \
    > "release/$image.faults"
  echo "$image: $(wc -l < "release/$image.faults") known faults"
  if grep -E "^True\|($SEVERITIES)\|" "release/$image.faults"; then
    bad=1
  fi
done
exit $bad
