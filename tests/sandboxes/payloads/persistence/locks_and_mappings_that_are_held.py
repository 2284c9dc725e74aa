#: name = "locks and mappings that are held"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import fcntl, mmap, os
if os.fork() == 0:
    f = open('/usr/bin/env', 'rb'); fcntl.flock(f, 2 | 4)
    g = open('held', 'wb'); g.write(bytes(4096)); g.flush()
    fcntl.lockf(g, 2 | 4); m = mmap.mmap(os.open('held', 2), 4096); os.unlink('held')
    import time; time.sleep(60)
