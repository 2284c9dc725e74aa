#: name = "files by odd names"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
for name in (b'\xff\xfe', b'new\nline', b'x' * 255, b' ', b'-rf', b'...', b'.hidden', b'\x1b[2J', b'*'):
    for place in (b'/tmp', b'/dev/shm'):
        try: os.mkdir(place + b'/' + name); open(place + b'/' + name + b'/' + name, 'w'); os.link(
            place + b'/' + name + b'/' + name, place + b'/' + name + b'/2')
        except OSError: pass
