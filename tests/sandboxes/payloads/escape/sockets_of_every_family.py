#: name = "sockets of every family"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker"]

import socket
for family in range(64):
    for kind in (1, 2, 3, 5):
        try: made = socket.socket(family, kind)
        except OSError: continue
        if family not in (1, 2, 10, 16): print("ESCAPED family", family, kind)
        if kind == 3 and family not in (1, 16): print("ESCAPED raw socket", family)
        made.close()
try: names = [name for _, name in socket.if_nameindex()]
except OSError: names = []
if names not in ([], ["lo"]): print("ESCAPED", names)
