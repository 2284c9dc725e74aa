#: name = "a full disk"
#: right = ["error", "oom"]
#: kinds = ["bubblewrap", "docker", "runsc"]

f = open('big', 'wb')
while True: f.write(bytes(1 << 20))
