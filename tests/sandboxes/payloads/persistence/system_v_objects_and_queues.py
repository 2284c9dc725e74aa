#: name = "System V objects and queues"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import ctypes
libc = ctypes.CDLL(None)
for key in (4242, 4243):
    libc.shmget(key, 4096, 0o1666); libc.semget(key, 3, 0o1666); libc.msgget(key, 0o1666)
libc.msgsnd(libc.msgget(4242, 0), b'\1' + bytes(7) + b'canary', 6, 0)
for i in range(5): libc.mq_open(b'/evil%d' % i, 0o102, 0o666, None)
