#: name = "sleepers that fill the sandbox"
#: right = ["error"]
#: lost = false
#: timeout_s = 30.0
#: kinds = ["bubblewrap", "docker"]

import subprocess
for _ in range(2000): subprocess.Popen(['sleep', '60'])
