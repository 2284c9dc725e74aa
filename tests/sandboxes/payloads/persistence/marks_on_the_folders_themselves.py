#: name = "marks on the folders themselves"
#: right = ["ok"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
for place in ('/tmp', '/dev/shm', '/dev/mqueue', '/branches'):
    for key in ('user.evil', 'trusted.evil', 'security.evil', 'system.posix_acl_default'):
        value = bytes.fromhex('0200000001000700ffffffff04000700ffffffff20000000ffffffff') if 'acl' in key else b'evil'
        try: os.setxattr(place, key, value)
        except OSError: pass
    for change in (lambda: os.chmod(place, 0), lambda: os.utime(place, (1, 1)), lambda: os.chown(place, -1, 0)):
        try: change()
        except OSError: pass
