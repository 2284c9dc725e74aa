#: name = "a swallowed interrupt"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2

import time
while True:
    try:
        time.sleep(60)
    except BaseException: pass
