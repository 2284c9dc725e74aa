#: name = "namespaces and mounts"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]
#: uses = ["syscalls"]

NEW = {"CGROUP": 1 << 25, "UTS": 1 << 26, "IPC": 1 << 27, "USER": 1 << 28, "PID": 1 << 29, "NET": 1 << 30}
NEW["NS"] = 1 << 17
for name, flag in NEW.items():
    reaches("unshare " + name, 272, flag)
reaches("clone3 into a user namespace", 435, ctypes.create_string_buffer(bytes([0, 0, 0, 16]) + bytes(60), 64), 64)
reaches("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0)
reaches("remount", 165, b"none", b"/", 0, 32, 0)
reaches("umount", 166, b"/tmp", 2)
reaches("pivot_root", 155, b"/tmp", b"/tmp")
reaches("chroot", 161, b"/tmp")
reaches("fsopen", 430, b"tmpfs", 0)
reaches("open_tree a copy", 428, -100, b"/", 1)
reaches("mount_setattr", 442, -100, b"/", 0, ctypes.create_string_buffer(32), 32)
reaches("setns", 308, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
