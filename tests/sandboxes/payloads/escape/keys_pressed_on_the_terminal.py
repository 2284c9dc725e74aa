#: name = "keys pressed on the terminal"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import fcntl, os
for fd in (0, 1, 2):
    try: fcntl.ioctl(fd, 0x5412, b'x'); print('ESCAPED')
    except OSError: pass
