#: name = "a daemon"
#: right = ["ok"]
#: lost = false

import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        while True:
            time.sleep(0.01)
            try: open('beat', 'w').write('x')
            except OSError: pass
    os._exit(0)
os.wait()
