#: name = "a clock and a timer that tick on"
#: right = ["ok"]
#: lost = false

import signal, resource
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); signal.setitimer(signal.ITIMER_PROF, 5, 5)
