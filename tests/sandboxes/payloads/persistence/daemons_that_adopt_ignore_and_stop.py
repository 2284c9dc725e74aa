#: name = "daemons that adopt, ignore and stop"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "unsafe"]

import ctypes, os, signal, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
