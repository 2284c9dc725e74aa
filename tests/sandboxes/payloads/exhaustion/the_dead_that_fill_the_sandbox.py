#: name = "the dead that fill the sandbox"
#: right = ["error"]
#: lost = false
#: timeout_s = 30.0
#: kinds = ["bubblewrap", "docker"]

import os
for _ in range(9999):
    if os.fork() == 0: os._exit(0)
