#: name = "a stopped worker"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2

import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
