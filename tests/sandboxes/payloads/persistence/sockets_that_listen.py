#: name = "sockets that listen"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import os, socket
if os.fork() == 0:
    kept = []
    for name in ('\0evil', '/tmp/evil.sock', '/dev/shm/evil.sock'):
        made = socket.socket(socket.AF_UNIX); made.bind(name); made.listen(); kept.append(made)
    kept[0].accept()
