#: name = "a fork bomb"
#: right = ["timeout"]
#: timeout_s = 0.5
#: kinds = ["bubblewrap", "docker"]

import os, time
for _ in range(12):
    try: os.fork()
    except OSError: pass
time.sleep(60)
