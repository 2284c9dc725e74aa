#: name = "signals queued without end"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(20_000): libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None)
