#: name = "a flood on both streams"
#: right = ["output_limit"]
#: lost = true

import os, threading
def flood(fd):
    while True: os.write(fd, bytes(65536))
for fd in (1, 2, 1, 2): threading.Thread(target=flood, args=(fd,), daemon=True).start()
flood(2)
