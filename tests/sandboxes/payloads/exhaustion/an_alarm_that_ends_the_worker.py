#: name = "an alarm that ends the worker"
#: right = ["killed"]
#: lost = true

import signal, time
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(60)
