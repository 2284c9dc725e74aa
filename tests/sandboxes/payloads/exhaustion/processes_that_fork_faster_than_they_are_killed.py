#: name = "processes that fork faster than they are killed"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
