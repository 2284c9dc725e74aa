#: name = "a channel shut down"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

import socket
socket.socket(fileno=os.dup(3)).shutdown(2)
time.sleep(60)
