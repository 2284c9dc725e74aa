#: name = "an ignored SIGINT"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2

import signal, time
signal.signal(2, signal.SIG_IGN)
time.sleep(60)
