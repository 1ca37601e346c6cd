#!/usr/bin/env bash
# Beside launch/torchrun.sh: ends the trainer and the servers in its place when it has been killed (kill -9).
#
#   launch/guard.sh FOLDER    the script's temporary folder, to be removed
#
# Standard input has lines "trainer PID" and "server PID" from that script, without PID once the process has ended. It
# ends with the script, however that ends. As at a SIGTERM, the servers run until the ranks have saved.
set -uo pipefail
trap '' TERM INT HUP PIPE # a signal to the process group is for the others, and the terminal may be gone

trainer="" server=""
while read -r name pid; do
    case $name in
    trainer) trainer=$pid ;;
    server) server=$pid ;;
    esac
done
# Not kill -0, which succeeds for a zombie: its parent may not wait for it. A zombie has no program.
runs() { [ -e "/proc/$1/exe" ]; }

if [ -n "$trainer" ] && runs "$trainer"; then
    echo "launch: the script was killed: the trainer finishes its step and saves" >&2
    read -ra ranks <"/proc/$trainer/task/$trainer/children" || true
    kill -TERM "${ranks[@]:-$trainer}" 2>/dev/null
    while runs "$trainer"; do sleep 0.5; done
fi
if [ -n "$server" ] && runs "$server"; then kill -TERM "$server"; fi
rm -rf "$1"
