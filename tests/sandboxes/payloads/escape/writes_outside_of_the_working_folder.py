#: name = "writes outside of the working folder"
#: right = ["ok"]
#: lost = false
#: timeout_s = 30.0
#: kinds = ["bubblewrap", "docker"]

import os
for line in open("/proc/self/mountinfo"):
    folder = line.split()[4]
    if folder in ("/tmp", "/dev/shm", "/dev/mqueue", "/branches"): continue
    for place in (folder, os.path.dirname(folder)):
        try: fd = os.open(os.path.join(place, "agentgym-evil"), os.O_WRONLY | os.O_CREAT)
        except OSError: continue
        print("ESCAPED", place)
for root in ("/proc/sys", "/sys"):
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not os.path.islink(os.path.join(folder, f))]
        for name in files:
            try: fd = os.open(os.path.join(folder, name), os.O_WRONLY)
            except OSError: continue
            os.close(fd)
            print("ESCAPED", folder, name)
names = "/proc/sysrq-trigger /proc/self/exe /proc/1/exe /agentgym/server/start.py /etc/passwd /usr/bin/python3"
for path in names.split():
    try: os.open(path, os.O_WRONLY)
    except OSError: continue
    print("ESCAPED", path)
