#!/bin/sh
# Stands first on PATH of a process-level node under the name of a program that would change the real machine.
# Logs the call; a shutdown ends the emulated instance, all else does nothing.
name=${0##*/}
echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $name $*" >>"${MICS_NODE_FOLDER:?}/shims.log"
case $name in
shutdown | poweroff | halt) ;;
*) exit 0 ;;
esac
for argument in "$@"; do
    case $argument in
    -c | -k | -r | --reboot) exit 0 ;; # cancel, only warn, reboot
    now | +0 | -*) ;;
    *)
        echo "$name: the sandbox ends an instance only at once, not at $argument" >&2
        exit 1
        ;;
    esac
done
kill "$(cat "$MICS_NODE_FOLDER/userd.pid")"
