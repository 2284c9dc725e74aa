#: name = "mount and unshare as programs"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]

mount -t tmpfs none /tmp && echo ESCAPED; unshare -Ur true && echo ESCAPED; unshare -m true && echo ESCAPED; nsenter -t 1 -m true && echo ESCAPED; mount -o remount,rw / && echo ESCAPED; true
