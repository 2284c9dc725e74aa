#: name = "calls that reach into the parent"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]
#: uses = ["syscalls"]

class IOVec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
ppid, room = os.getppid(), ctypes.create_string_buffer(64)
for request in (16, 0x4206):
    reaches("ptrace", 101, request, ppid, 0, 0)
mine, theirs = IOVec(ctypes.addressof(room), 8), IOVec(id(os), 8)
reaches("process_vm_readv", 310, ppid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
reaches("process_vm_writev", 311, ppid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
parent = os.pidfd_open(ppid)
for fd in range(3, 12):
    reaches("pidfd_getfd", 438, parent, fd, 0)
reaches("kcmp", 312, os.getpid(), ppid, 1, 0, 0)
reaches("move_pages", 279, ppid, 0, 0, 0, 0, 0)
reaches("migrate_pages", 256, ppid, 0, 0, 0)
reaches("get_robust_list", 274, ppid, room, room)
