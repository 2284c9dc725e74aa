#: name = "calls into the kernel"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]
#: uses = ["syscalls"]

buffer = ctypes.create_string_buffer(256)
reaches("io_uring_setup", 425, 4, buffer)
reaches("bpf", 321, 0, buffer, 128)
reaches("perf_event_open", 298, buffer, 0, -1, -1, 0)
reaches("userfaultfd", 323, 1)
reaches("kexec_load", 246, 0, 0, 0, 1 << 63)
reaches("init_module", 175, buffer, 0, b"")
reaches("finit_module", 313, -1, b"", 0)
reaches("open_by_handle_at", 304, -100, buffer, 0)
reaches("add_key", 248, b"user", b"agentgym", b"evil", 4, -4)
reaches("request_key", 249, b"user", b"agentgym", 0, -4)
reaches("keyctl", 250, 0, -4, 1)
reaches("acct", 163, b"/tmp/none")
reaches("swapon", 167, b"/tmp/none", 0)
reaches("reboot", 169, 1, 2, 3, 0)
reaches("sethostname", 170, b"evil", 4)
reaches("iopl", 172, 3)
reaches("ioperm", 173, 0, 1, 1)
reaches("settimeofday", 164, buffer, 0)
reaches("clock_settime", 227, 0, buffer)
reaches("quotactl", 179, 0, 0, 0, 0)
reaches("syslog", 103, 3, buffer, 100)
reaches("fanotify_init", 300, 0, 0)
reaches("lookup_dcookie", 212, 0, buffer, 100)
