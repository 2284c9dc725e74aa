#: name = "devices"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]
#: uses = ["opens"]

for name in 'mem kmem kmsg port sda vda nvme0n1 fuse net/tun kvm vsock vhost-vsock loop-control loop0 mapper/control snapshot'.split():
    opens('/dev/' + name)
opens('/dev/tty', os.O_RDWR)
import stat
for kind, device in ((stat.S_IFBLK, (8, 0)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 1))):
    try: os.mknod('device', kind | 0o666, os.makedev(*device)); opens('device'); os.unlink('device')
    except OSError: pass
