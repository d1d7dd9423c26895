#!/bin/bash
# First part of the startup script of a small VM, which runs at every boot; what follows is that of
# the hosts up to its mark, and the task. At the end, whatever happened, the VM is deleted, or
# switched off where its account may not delete it.
ask() {
  curl -sf --max-time 10 --retry 5 --retry-all-errors -H 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}
leave() {
  trap - EXIT
  local compute=${CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE:-https://compute.googleapis.com/compute/v1/}
  local self token
  self=$(ask attributes/lmwright-self)
  token=$(ask service-accounts/default/token | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/')
  curl -sf --max-time 60 --retry 5 --retry-all-errors -X DELETE -o /dev/null -K - <<<"header = \"Authorization: Bearer $token\"
url = \"${compute%/}/$self\"" && sleep 120
  poweroff
}
trap leave EXIT
