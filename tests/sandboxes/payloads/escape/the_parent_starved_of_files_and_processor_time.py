#: name = "the parent starved of files and processor time"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]

import os, resource
for what, value in ((resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 1 << 20)):
    try: resource.prlimit(os.getppid(), what, (value, value))
    except (OSError, ValueError): pass
