#: name = "files in memory without a name"
#: right = ["ok", "error", "oom"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
kept = []
for _ in range(6):
    fd = os.memfd_create('x'); kept.append(fd)
    for _ in range(100): os.write(fd, bytes(1 << 20))
