#!/usr/bin/env bash
# Slurm, its munge and iproute2 for `make test-slurm`, from Debian's packages where they are missing. Starts no service.
set -euo pipefail
missing=()
for program in ip munged slurmctld slurmd sbatch srun scontrol; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "${missing[*]} not found, and only root on Debian or Ubuntu can install them here; install Slurm and munge" >&2
    exit 2
fi
echo "installing slurm-wlm, munge and iproute2" >&2
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge iproute2; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    echo "apt-get could not install them; its output is in $log" >&2
    exit 2
fi
rm -f "$log"
