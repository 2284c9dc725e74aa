#: name = "the death of all"
#: right = ["ok", "killed", "error"]
#: kinds = ["bubblewrap", "docker", "runsc"]

import os; os.fork(); os.kill(-1, 9)
