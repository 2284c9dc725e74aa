#: name = "the network"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import socket
for address in (("1.1.1.1", 53), ("169.254.169.254", 80), ("172.17.0.1", 2375), ("10.0.2.2", 80), ("8.8.8.8", 443)):
    try: socket.create_connection(address, timeout=1)
    except OSError: continue
    print("ESCAPED", address)
for address in (("8.8.8.8", 53), ("255.255.255.255", 67), ("224.0.0.251", 5353)):
    try:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        made.sendto(b"x", address)
    except OSError: continue
    print("ESCAPED", address)
