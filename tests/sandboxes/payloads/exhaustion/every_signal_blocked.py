#: name = "every signal blocked"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2

import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
time.sleep(60)
