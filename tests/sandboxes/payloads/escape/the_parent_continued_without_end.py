#: name = "the parent continued without end"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
if os.fork() == 0:
    while True: os.kill(os.getppid(), 18); os.kill(1, 2)
