#!/bin/bash
# Startup script of every host of a slice. It runs at every boot, so each part may find its work
# done. It needs bash, curl and tar of the image, and reaches the metadata server and the bucket
# only. Which job it serves is in the metadata of its slice. What it prints is kept in the bucket
# when something fails; a slice on which that lasts for hours is deleted.
set -u
metadata=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1
storage=${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}
tpus=${CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU:-https://tpu.googleapis.com/}
home=${LMWRIGHT_HOME:-/opt/lmwright}
patience=${LMWRIGHT_PATIENCE_S:-7200} pause=${LMWRIGHT_PAUSE_S:-5}
# a transfer that stands still is begun again
steady=(--connect-timeout 10 --speed-limit 1000 --speed-time "${LMWRIGHT_STALL_S:-30}")
well=$SECONDS  # when this host was in order last

mkdir -p "$home"
exec > >(tee -a "$home/console.log") 2>&1

about() {
  curl -sf --max-time 10 --retry 20 --retry-all-errors -H 'Metadata-Flavor: Google' "$metadata/$1"
}

token() {
  about instance/service-accounts/default/token |
    sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/'
}

authorized() { curl -K - "${steady[@]}" "$@" <<<"header = \"Authorization: Bearer $(token)\""; }

escaped() {  # the name of an object as a part of a URL
  local LC_ALL=C at sign byte
  for ((at = 0; at < ${#1}; at++)); do
    sign=${1:at:1}
    case $sign in
      [a-zA-Z0-9._~-]) printf %s "$sign" ;;
      *) printf -v byte %d "'$sign" && printf %%%02X $((byte & 255)) ;;
    esac
  done
}

fetch() {  # gs://bucket/object file
  local bucket=${1#gs://} code
  local name=${bucket#*/}
  bucket=${bucket%%/*}
  until code=$(authorized -sf -w '%{http_code}' --retry 2 --retry-all-errors -o "$2.part" \
    "$storage/storage/v1/b/$bucket/o/$(escaped "$name")?alt=media") && mv "$2.part" "$2"; do
    fails "cannot fetch $1 (HTTP $code); trying again"
  done
}

fails() {  # keeps the output in the bucket; gives the slice up after a long time without success
  local facts job slice name bucket
  [ -n "$1" ] && echo "$1"
  facts=$(about instance/attributes/tpu-env)
  job=$(about instance/attributes/lmwright-job) slice=$(about instance/attributes/lmwright-slice)
  name=$(sed -n "s/^ *NODE_ID: *'\(.*\)' *$/\1/p" <<<"$facts")
  name=${name:-$slice}-$(sed -n "s/^ *WORKER_ID: *'\(.*\)' *$/\1/p" <<<"$facts").log
  job=${job#gs://} bucket=${job%%/*} name=${job#*/}/console/$name
  tail -c 20000 "$home/console.log" >"$home/console.tail"
  authorized -s -o /dev/null -X POST -H 'Content-Type: text/plain' \
    --data-binary @"$home/console.tail" \
    "$storage/upload/storage/v1/b/$bucket/o?uploadType=media&name=$(escaped "$name")"
  if [ $((SECONDS - well)) -gt "$patience" ]; then
    echo "nothing works here since $patience s; deleting $slice"
    local project zone
    project=$(about project/project-id) zone=$(about instance/zone)
    authorized -s -X DELETE \
      "${tpus}v2/projects/$project/locations/${zone##*/}/queuedResources/$slice?force=true"
    exit 1
  fi
  sleep "$pause"
}

install() {
  rm -rf "$here" && mkdir -p "$here/wheels"
  for part in python.tar.gz wheels.tar lmwright.tar; do fetch "$code/$part" "$here/$part"; done
  tar -xzf "$here/python.tar.gz" -C "$here" && tar -xf "$here/wheels.tar" -C "$here/wheels" &&
    tar -xf "$here/lmwright.tar" -C "$here" && rm -f "$here"/*.tar "$here"/*.tar.gz &&
    "$here/python/bin/python3" -m venv "$here/venv" &&
    "$here/venv/bin/pip" install -q --no-index --no-deps --find-links "$here/wheels" \
      --require-hashes -r "$here/hosts.lock" &&
    "$here/venv/bin/pip" install -q --no-index --no-deps "$here"/lmwright-*.whl &&
    touch "$here/ready"
}

code=$(about instance/attributes/lmwright-code)
here=$home/${code##*/}
until [ -e "$here/ready" ]; do install || fails ""; done
export XDG_STATE_HOME=$home/state XDG_CACHE_HOME=$home/cache
cd "$home"
# --- what the machine is for
until "$here/venv/bin/python" -m lmwright.cloud.disks; do fails ""; done
began=$SECONDS
until "$here/venv/bin/python" -m lmwright.cloud.host; do
  [ $((SECONDS - began)) -gt 600 ] && well=$SECONDS
  fails ""
  began=$SECONDS
done
