#!/bin/busybox sh
# The first process of a guest. It takes the machine's root, read-only and with a layer of memory over it, and
# runs there what /guest says; then it powers the guest off, whatever came of it.
B=/bin/busybox
$B mount -t proc proc /proc && $B mount -t sysfs sysfs /sys && $B mount -t devtmpfs dev /dev
for m in $($B cat /modules/order); do $B insmod "/modules/$m"; done
if $B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro hostroot /lower &&
   $B mount -t tmpfs tmpfs /rw && $B mkdir /rw/upper /rw/work &&
   $B mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work overlay /host; then
    for d in proc sys dev; do $B mount --bind "/$d" "/host/$d"; done
    $B mount -t tmpfs tmpfs /host/run
    $B mkdir -p /host/dev/shm && $B mount -t tmpfs tmpfs /host/dev/shm
    $B ifconfig lo 127.0.0.1 up
    $B cp /guest /host/run/guest
    $B chroot /host /bin/sh /run/guest
    $B echo "EXIT $?"
else
    $B echo "the guest has no root"
fi
$B poweroff -f
