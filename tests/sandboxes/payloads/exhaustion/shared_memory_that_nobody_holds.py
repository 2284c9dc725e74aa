#: name = "shared memory that nobody holds"
#: right = ["ok", "error", "oom"]
#: following = ["ok", "oom", "killed", "error"]
#: kinds = ["bubblewrap", "docker"]

import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for key in range(12):
    at = libc.shmat(libc.shmget(0, 64 << 20, 0o1666), None, 0)
    if at in (None, 2 ** 64 - 1): raise MemoryError
    ctypes.memset(at, 1, 64 << 20); libc.shmdt(ctypes.c_void_p(at))
