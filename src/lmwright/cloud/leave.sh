#!/bin/bash
# First part of the startup script of a small VM, which runs at every boot; what follows is that of
# the hosts up to its mark, and the task. At the end, whatever happened, the VM is deleted, or
# switched off where its account may not delete it.
compute=${CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE:-https://compute.googleapis.com/compute/v1/}
leave() {
  trap - EXIT
  local self token
  self=$(about attributes/lmwright-self)
  token=$(about service-accounts/default/token | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/')
  curl -sf -m 60 --retry 5 --retry-all-errors -X DELETE -o /dev/null -K - <<<"header = \"Authorization: Bearer $token\"
url = \"${compute%/}/$self\"" && sleep 120
  poweroff
}
trap leave EXIT
