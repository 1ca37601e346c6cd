#!/usr/bin/env bash
# podman, docker and runc for the tests of agents in containers, from Debian's packages where they are missing. Starts no
# service.
set -euo pipefail
missing=()
for program in podman runc docker dockerd; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "${missing[*]} not found, and only root on Debian or Ubuntu can install them here; install podman and docker" >&2
    exit 2
fi
echo "installing podman, runc and docker.io" >&2
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends podman runc docker.io; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    echo "apt-get could not install them; its output is in $log" >&2
    exit 2
fi
rm -f "$log"
