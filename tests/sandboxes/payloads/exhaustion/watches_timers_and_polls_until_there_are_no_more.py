#: name = "watches, timers and polls until there are no more"
#: right = ["error"]
#: lost = false

import ctypes, select, os
libc = ctypes.CDLL(None)
made = [libc.inotify_init() for _ in range(600)] + [libc.timerfd_create(1, 0) for _ in range(600)]
polls = [select.epoll() for _ in range(600)]
