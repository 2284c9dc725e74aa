#: name = "pipes and sockets full to the brim"
#: right = ["ok", "oom"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import fcntl, os, socket
kept = []
try:
    while True:
        r, w = os.pipe(); kept += [r, w]; os.set_blocking(w, False)
        fcntl.fcntl(w, 1031, 1 << 20); os.write(w, bytes(1 << 20))
except OSError: pass
len(kept) > 10
