#!/bin/bash
# Startup script of every host of a slice. It runs at every boot, so each part may find its work
# done. It needs bash, curl and tar of the image, and reaches the metadata server and the bucket
# only. Which job it serves is in the metadata of its slice.
set -u
metadata=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance
storage=${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}
home=${LMWRIGHT_HOME:-/opt/lmwright}

about() { curl -sf --retry 20 --retry-all-errors -H 'Metadata-Flavor: Google' "$metadata/$1"; }

fetch() {  # gs://bucket/object file
  local bucket=${1#gs://} token
  local name=${bucket#*/}
  bucket=${bucket%%/*}
  until token=$(about service-accounts/default/token | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/') &&
    curl -sf --retry 5 --retry-all-errors -K - -o "$2.part" <<<"header = \"Authorization: Bearer $token\"
url = \"$storage/storage/v1/b/$bucket/o/${name//\//%2F}?alt=media\"" && mv "$2.part" "$2"; do
    echo "cannot fetch $1; trying again"
    sleep 5
  done
}

mkdir -p "$home"
code=$(about attributes/lmwright-code)
here=$home/${code##*/}
if [ ! -e "$here/ready" ]; then
  rm -rf "$here" && mkdir -p "$here/wheels"
  for part in python.tar.gz wheels.tar lmwright.tar; do fetch "$code/$part" "$here/$part"; done
  tar -xzf "$here/python.tar.gz" -C "$here"
  tar -xf "$here/wheels.tar" -C "$here/wheels"
  tar -xf "$here/lmwright.tar" -C "$here"
  rm -f "$here"/*.tar "$here"/*.tar.gz
  "$here/python/bin/python3" -m venv "$here/venv" &&
    "$here/venv/bin/pip" install -q --no-index --no-deps --find-links "$here/wheels" \
      --require-hashes -r "$here/hosts.lock" &&
    "$here/venv/bin/pip" install -q --no-index --no-deps "$here"/lmwright-*.whl &&
    touch "$here/ready"
fi
export XDG_STATE_HOME=$home/state XDG_CACHE_HOME=$home/cache
cd "$home"
# --- what the machine is for
"$here/venv/bin/python" -m lmwright.cloud.disks
until "$here/venv/bin/python" -m lmwright.cloud.host; do sleep 2; done
