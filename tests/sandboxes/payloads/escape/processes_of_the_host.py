#: name = "processes of the host"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
for pid in filter(str.isdigit, os.listdir('/proc')):
    if int(pid) not in (1, os.getpid()): print('ESCAPED', open(f'/proc/{pid}/cmdline').read())
