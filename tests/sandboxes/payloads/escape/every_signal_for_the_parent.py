#: name = "every signal for the parent"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]

import os, signal
for _ in range(50):
    for n in signal.valid_signals(): os.kill(os.getppid(), n)
