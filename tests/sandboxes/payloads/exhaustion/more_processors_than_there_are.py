#: name = "more processors than there are"
#: right = ["timeout"]
#: timeout_s = 0.3
#: kinds = ["bubblewrap", "docker", "runsc"]

import os
for _ in range(3): os.fork()
while True: pass
