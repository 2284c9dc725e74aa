#: name = "sockets of the host"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import os, socket
names = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"]
for folder, _, files in os.walk("/run"): names += [os.path.join(folder, f) for f in files]
names += ["\0" + line.split("@", 1)[1].strip() for line in open("/proc/net/unix") if " @" in line]
for name in names:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        made = socket.socket(socket.AF_UNIX, kind)
        try: made.connect(name)
        except OSError: continue
        print("ESCAPED", repr(name))
