#: name = "privileges"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]

import ctypes, os
for change in (os.setuid, os.setgid, os.seteuid):
    try: change(0)
    except OSError: continue
    print("ESCAPED", change)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(status[name], 16): print("ESCAPED", name, status[name])
if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) != 1: print("ESCAPED no_new_privs")
