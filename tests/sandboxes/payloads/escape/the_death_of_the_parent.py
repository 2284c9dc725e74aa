#: name = "the death of the parent"
#: right = ["ok"]
#: lost = false
#: kinds = ["bubblewrap", "docker"]

import os; os.kill(os.getppid(), 9)
