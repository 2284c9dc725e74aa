#: name = "children that share out the memory"
#: right = ["ok", "error", "oom", "timeout"]
#: timeout_s = 2.0
#: kinds = ["bubblewrap", "docker"]

import os, time
for _ in range(4):
    if os.fork() == 0:
        x = b'x' * (200 << 20); time.sleep(60)
for _ in range(4): os.wait()
