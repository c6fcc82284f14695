#!/bin/sh
# ForceCommand of a process-level node. sshd starts every session, sftp too, in the account's real home folder; a node
# has its own. An interactive shell is no login shell, because /etc/profile would take the shims off PATH.
cd "$HOME" || exit 1
if [ -n "$SSH_ORIGINAL_COMMAND" ]; then
    exec bash -c "$SSH_ORIGINAL_COMMAND"
fi
exec bash -i
