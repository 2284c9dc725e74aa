#: name = "the parent's limits and priority"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]

import os, resource
ppid = os.getppid()
def got(name, change, *args):
    try: change(*args)
    except (OSError, ValueError): return
    print("ESCAPED", name)
for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    got("prlimit", resource.prlimit, ppid, what, resource.prlimit(0, what))
got("nice", os.setpriority, os.PRIO_PROCESS, ppid, 5)
got("affinity", os.sched_setaffinity, ppid, {min(os.sched_getaffinity(0))})
got("scheduler", os.sched_setscheduler, ppid, os.SCHED_IDLE, os.sched_param(0))
