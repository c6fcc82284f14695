#!/bin/sh
# Pid 1 of one node of the netns level, in namespaces of its own; in the end it becomes the node's sshd.
# Says "r" on standard output, waits for a line on standard input (dash knows no file numbers above 9), then writes to
# standard error only: the console. Environment: see noded.py.
set -e
echo r
read -r _go
exec >&2 </dev/null

hostname "$NODE_NAME"
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || :
ip -batch - <<END
link set lo up
addr add $NODE_IP/$PREFIX dev eth0
link set eth0 mtu 9001 up
route add default via $GATEWAY
END
# shellcheck disable=SC2086  # words on purpose
[ -z "$TBF" ] || tc qdisc add dev eth0 root tbf $TBF
# The kernel's default, whatever this machine uses. A namespace may be denied cubic where the machine uses another.
for control in cubic reno; do
    echo "$control" >/proc/sys/net/ipv4/tcp_congestion_control 2>/dev/null && break
done

root=$NODE/root
mount -t overlay overlay -o "lowerdir=$LAYER:/,upperdir=$NODE/upper,workdir=$NODE/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" || echo "no sysfs"
mount -t tmpfs -o mode=755,size=1m dev "$root/dev"
for name in null zero full random urandom tty; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/run"

# bind SOURCE TARGET [ro]
bind() {
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root${2%/*}" && [ -e "$root$2" ] || : >"$root$2"; fi
    mount --rbind "$1" "$root$2"
    [ -z "$3" ] || mount -o remount,bind,ro "$root$2"
}
home=/home/$LOGIN
bind "$NODE/home" "$home"
bind "$SHARED" /fsx
bind "$HOSTS_FILE" /etc/hosts ro
while IFS='	' read -r source target; do
    [ -z "$source" ] || bind "$source" "$target" ro
done <"$NODE/binds"

cp "$NODE/user-data" "$NODE/authorized_keys" "$root/run/"
cd "$root"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
rmdir /.old
echo "$NODE_NAME" >/etc/hostname
mkdir -p /run/sshd "$home/.ssh"
cp /etc/skel/.bashrc /etc/skel/.profile "$home/" 2>/dev/null || :
mv /run/authorized_keys "$home/.ssh/"
chmod 600 "$home/.ssh/authorized_keys"
chmod 700 "$home/.ssh" "$home"
chown -R "$LOGIN_UID:$LOGIN_GID" "$home"

# what every session sees
echo "SetEnv AWS_ENDPOINT_URL_S3=$AWS_ENDPOINT_URL_S3 AWS_DEFAULT_REGION=$AWS_DEFAULT_REGION" >>/etc/ssh/sshd_config_sandbox

rm -f /etc/ssh/ssh_host_*
for kind in ecdsa ed25519; do
    ssh-keygen -q -t $kind -N '' -C "root@$NODE_NAME" -f /etc/ssh/ssh_host_${kind}_key
done
# cloud-init prints the keys bare, or through logger(1), depending on its version: every second node does the one
say() { cat; }
if [ $((${NODE_IP##*.} % 2)) = 1 ]; then
    say() { sed "s/^/<14>$(date '+%b %e %T') cloud-init: ec2: /"; }
fi
{
    echo "-----BEGIN SSH HOST KEY FINGERPRINTS-----"
    for kind in ecdsa ed25519; do ssh-keygen -lf /etc/ssh/ssh_host_${kind}_key.pub; done
    echo "-----END SSH HOST KEY FINGERPRINTS-----"
    echo "-----BEGIN SSH HOST KEY KEYS-----"
    cat /etc/ssh/ssh_host_*_key.pub
    echo "-----END SSH HOST KEY KEYS-----"
} | say

# User data runs as root with nearly no environment, as cloud-init runs it; HOME is not set either.
if [ -s /run/user-data ]; then
    script=/var/lib/cloud/instance/user-data.txt
    mv /run/user-data $script
    case $(head -c 2 $script | od -An -tx1 | tr -d ' ') in
        1f8b) gzip -dc $script >/run/unpacked && mv /run/unpacked $script ;;
    esac
    chmod 700 $script
    if [ "$(head -c 2 $script)" = '#!' ]; then
        {
            code=0
            env -i "PATH=$PATH" LANG=C.UTF-8 "MICSCTL_SANDBOX=$MICSCTL_SANDBOX" $script || code=$?
            : >/var/lib/cloud/instance/boot-finished
            echo "cloud-init: finished, user data ended with $code"
        } 2>&1 | tee -a /var/log/cloud-init-output.log &
    else
        echo "cloud-init: the user data is not a script"
    fi
fi
unset NODE NODE_NAME NODE_IP PREFIX GATEWAY TBF LAYER SHARED HOSTS_FILE AWS_ENDPOINT_URL_S3 AWS_DEFAULT_REGION
exec "$SSHD" -D -e -f /etc/ssh/sshd_config_sandbox
