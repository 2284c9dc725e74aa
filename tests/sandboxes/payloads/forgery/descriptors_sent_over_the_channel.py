#: name = "descriptors sent over the channel"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

import socket
channel = socket.socket(fileno=os.dup(3))
for _ in range(20): socket.send_fds(channel, [b'\0'], [0, 1, 2])
