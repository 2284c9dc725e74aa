#: name = "setuid programs"
#: right = ["ok"]
#: timeout_s = 60.0
#: kinds = ["bubblewrap", "docker", "runsc"]

for f in $(find / -xdev -perm /6000 -type f 2>/dev/null); do echo '' | timeout 1 $f -c id 2>&1 | grep -q 'uid=0' && echo ESCAPED $f; done; cp /bin/sh s; chmod 6755 s; ./s -c 'id' | grep 'uid=0' && echo ESCAPED; true
