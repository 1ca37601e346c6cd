#!/usr/bin/env bash
# Chromium and its driver for `make test-page`, from Debian's packages where they are missing.
set -euo pipefail
missing=()
for program in chromium chromedriver; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "${missing[*]} not found, and only root on Debian can install them here; install chromium and its driver" >&2
    exit 2
fi
echo "installing chromium and chromium-driver" >&2
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    echo "apt-get could not install them; its output is in $log" >&2
    exit 2
fi
rm -f "$log"
