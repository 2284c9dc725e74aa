#: name = "a main thread that left its threads behind"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2
# PyDLL: the thread leaves with the interpreter's lock in its hand.

import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
ctypes.PyDLL(None).syscall(60, 0)
