#: name = "every folder in memory full"
#: right = ["error", "killed", "oom"]
#: kinds = ["bubblewrap", "docker", "runsc"]

for d in /tmp /dev/shm /dev/mqueue; do cat /dev/zero > $d/full; done
