#!/bin/sh
# Inside new mount, pid, cgroup and network namespaces: make a root of the host's own / under an overlay in memory, and
# become its systemd. Nothing of it is seen by the host, and nothing is left when PID 1 ends.
# usage: boot.sh DIRECTORY PATH...    each PATH is shown at its own place
set -eu
base=$1
shift
mount --make-rprivate /
mount -t tmpfs -o size=1g kvcsfs-test "$base"
mkdir "$base/up" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/up,workdir=$base/work" "$base/root"
root=$base/root

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
for device in null zero full random urandom tty fuse; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for path in "$@"; do
    mkdir -p "$root$path"
    # The daemon has a user of its own, who may not pass a home directory; only the overlay's is opened.
    parent=$path
    while parent=$(dirname "$parent") && [ "$parent" != / ]; do chmod o+x "$root$parent"; done
    mount --rbind "$path" "$root$path"
done

# Its own target, so that the services that the host has enabled stay off.
units=$root/etc/systemd/system
cat >"$units/kvcsfs-test.target" <<'X'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
X
for unit in systemd-networkd systemd-resolved systemd-timesyncd systemd-udevd systemd-logind; do
    ln -sf /dev/null "$units/$unit.service"
done

mkdir -p "$root/old"
cd "$root"
pivot_root . old
umount -l /old
exec env -i container=kvcsfs PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=kvcsfs-test.target
