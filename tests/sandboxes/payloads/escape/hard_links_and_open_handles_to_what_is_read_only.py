#: name = "hard links and open handles to what is read-only"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
for path in ('/etc/passwd', '/usr/bin/env', '/proc/self/exe'):
    try: os.link(path, 'linked'); open('linked', 'r+b'); print('ESCAPED', path)
    except OSError: pass
for fd in os.listdir('/proc/self/fd'):
    try: target = os.readlink('/proc/self/fd/' + fd)
    except OSError: continue
    if target.startswith('/') and target != '/dev/null' and not target.endswith('/fd'):
        print('ESCAPED', fd, target)
