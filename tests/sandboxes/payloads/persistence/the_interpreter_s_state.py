#: name = "the interpreter's state"
#: right = ["ok"]
#: lost = false
#: following = ["ok", "error"]
#: honest = false

import builtins, gc, locale, os, random, resource, signal, sys, threading, time
builtins.print, builtins.evil = (lambda *a: None), 1
os.environ.update(PYTHONPATH='/tmp', LD_PRELOAD='/tmp/evil.so', EVIL='1')
sys.path.insert(0, '/tmp/evil'); sys.modules['evil'] = os; sys.evil = 1; time.time = None
sys.setrecursionlimit(99); os.umask(0o777); os.chdir('/'); os.nice(5); gc.disable(); random.seed(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
